import time


def coordinate(grid, context):
    import sys

    from flwr.app import Message

    from sordino.engine.federation.door import from_records, to_records
    print("NODES", [(n.node_id, n.name, n.status) for n in grid.get_nodes()], context.run_config, file=sys.stderr)
    while not list(grid.get_node_ids()): time.sleep(0.2)
    for r in range(4):
        for n in grid.get_nodes():
            t=time.time()
            ids = list(grid.push_messages([Message(to_records(b"x"*100000), n.node_id, "train")]))
            while True:
                got = list(grid.pull_messages(ids))
                if got: break
                time.sleep(0.1)
            print("ROUND", r, n.name, time.time()-t, (got[0].has_error() and got[0].error) or len(from_records(got[0].content)), file=sys.stderr)
