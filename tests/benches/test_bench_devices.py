"""The benchmark on a device: its meters, the peers that run there, what is refused. A GPU's are tried on a fake one."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import bench as benchmark
from bench import meter, ours, peers, vmapped, workloads
from sordino.errors import BadInput

TINY = workloads.Workload("tiny", 3, 2, 8, 40, "cnn-small", (1, 8, 8))


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(workloads.WORKLOADS, "tiny", TINY)
    return workloads.prepare(TINY)


def clipped_steps(task: workloads.Task) -> dict[str, torch.Tensor]:
    """Σ over clients of what their clipped steps without noise change, record by record in plain loops."""
    total = {name: torch.zeros_like(one) for name, one in task.model.named_parameters()}
    for client in range(task.work.clients):
        model = copy.deepcopy(task.model)
        for batch in task.batches[client]:
            sums = {name: torch.zeros_like(one) for name, one in model.named_parameters()}
            for place in task.own(client)[batch]:
                loss = nn.functional.cross_entropy(model(task.x[place][None]), task.y[place][None])
                found = torch.autograd.grad(loss, list(model.parameters()))
                norm = torch.sqrt(sum(one.square().sum() for one in found))
                for one, each in zip(sums.values(), found):
                    one += each * min(1.0, 1.0 / float(norm))
            with torch.no_grad():
                for parameter, one in zip(model.parameters(), sums.values()):
                    parameter -= 0.05 * one / task.work.batch
        for (name, one), first in zip(model.named_parameters(), task.model.parameters()):
            total[name] += one.detach() - first.detach()
    return total


def test_both_vmapped_peers_take_the_clipped_steps_of_plain_loops(tiny, monkeypatch):
    monkeypatch.setattr(workloads.Task, "spread", lambda self, client: 0.0)
    monkeypatch.setattr(vmapped, "KEPT", 2 * 16 * 4 * sum(p.numel() for p in tiny.model.parameters()))
    wanted = clipped_steps(tiny)
    for peer in ("vmap", "vmap-stacked"):
        found = peers.find(peer)(tiny)()
        for name, one in wanted.items():
            torch.testing.assert_close(found[name], one, rtol=1e-4, atol=1e-6)


def test_vmapped_peers_add_the_planned_noise(tiny):
    run, quiet = peers.find("vmap")(tiny), clipped_steps(tiny)
    torch.manual_seed(0)
    found = run()
    noise = torch.cat([(found[name] - one).flatten() for name, one in quiet.items()])
    planned = sum(TINY.steps * tiny.spread(client) ** 2 for client in range(3)) ** 0.5 * 0.05 / TINY.batch
    assert float(noise.std()) == pytest.approx(planned, rel=0.1)


def test_a_running_simulation_takes_one_round_after_the_other_and_starts_anew_at_its_end(tiny, monkeypatch):
    monkeypatch.setattr(ours, "RUNNING", 2)
    started = []

    class Seen(ours.Session):
        def rounds(self):
            started.append(self)
            return super().rounds()

    monkeypatch.setattr(ours, "Session", Seen)
    run = peers.find("sordino-running")(tiny)
    for _ in range(3):
        run()
    run.stop()
    assert [one.state.round for one in started] == [2, 1]


def test_a_processor_is_timed_by_the_clock():
    found = meter.meter_of("cpu")
    assert isinstance(found, meter.Processor)
    assert 0 < found.seconds(lambda: sum(range(1000))) < 1
    assert found.about() == {"device": "cpu"}


@pytest.fixture
def graphics(monkeypatch):
    """A GPU of which only the calls are there; ``told`` is what it was told, in order."""
    told = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing
            self.number = len([one for one in told if one == "event"])
            told.append("event")

        def record(self):
            told.append(f"record {self.number}")

        def synchronize(self):
            told.append(f"wait for {self.number}")

        def elapsed_time(self, other):
            assert (self.number, other.number) == (0, 1)
            return 1500.0

    fake = SimpleNamespace(
        Event=Event,
        synchronize=lambda device: told.append("wait for all"),
        memory_allocated=lambda device: 3 * 2**20,
        max_memory_allocated=lambda device: 10 * 2**20,
        reset_peak_memory_stats=lambda device: told.append("reset"),
        get_device_name=lambda device: "a fake",
    )
    monkeypatch.setattr(torch, "cuda", fake)
    return meter.Graphics(torch.device("cuda")), told


def test_a_gpu_is_timed_by_events_from_a_moment_of_rest(graphics):
    found, told = graphics
    assert found.seconds(lambda: told.append("work")) == 1.5
    assert told == ["event", "event", "wait for all", "record 0", "work", "record 1", "wait for 1"]


def test_a_gpus_memory_is_what_the_work_adds(graphics):
    found, told = graphics
    assert found.peak("W1", "plain", lambda: told.append("work")) == 7
    assert told == ["wait for all", "reset", "work", "wait for all"]
    assert found.about()["device"] == "a fake"
    assert set(found.about()["tf32"]) == {"convolutions", "products"}


def test_a_gpu_is_warmed_up_longer_and_told_of_in_the_table(tiny, monkeypatch):
    class Device(str):
        type = "cuda"

    class Pretended(meter.Processor):
        device = Device("cpu")

        def __init__(self):
            pass

        def peak(self, workload, peer, work):
            return 1.0

        def about(self):
            return {"device": "a fake", "tf32": {}}

    monkeypatch.setattr(benchmark, "meter_of", lambda device: Pretended())
    shown = []
    found = benchmark.bench(["tiny"], [], 1, show=shown.append, device="cuda", deterministic=False)
    assert len([one for one in shown if "warm-up" in one]) == 2 * benchmark.WARM
    assert found["tiny"]["peak_mb"] == {"sordino": 1.0, "plain": 1.0}
    assert (found["_meta"]["device"], found["_meta"]["deterministic"]) == ("a fake", False)
    assert "a fake" in benchmark.comparison(found).title
    with pytest.raises(BadInput, match="flower's clients are processes on a CPU"):
        benchmark.bench(["tiny"], ["flower"], device="cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_machine_without_a_gpu_says_so():
    with pytest.raises(BadInput, match="'cuda' was asked for, but this machine has no usable GPU"):
        benchmark.bench(["W1"], [], device="cuda")


def test_the_command_refuses_what_it_cannot_measure(in_folder):
    code, _, err = in_folder("bench", "--growth", "--device", "cuda")
    assert (code, "--growth measures a CPU" in err) == (2, True)
    code, _, err = in_folder("bench", "--work", "W1", "--device", "tpu")
    assert (code, "device 'tpu' is unknown" in err) == (2, True)
