"""What a client has spent, in plain words: a statement that a privacy officer can read, and the same as JSON."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from sordino.privacy import accounting
from sordino.privacy.attacker import attack_in_words, attacks
from sordino.privacy.book import Binding, Standing, TopUp, number
from sordino.privacy.ledger import Ledger
from sordino.privacy.living import is_held, twin
from sordino.privacy.statement_levels import levels_in_words, levels_of
from sordino.privacy.statement_living import KEPT, lives, lives_in_words
from sordino.privacy.titles import named, titles
from sordino.privacy.trust import EVERYBODY, Shared, spelt
from sordino.privacy.types import RECORD, Adjacency, Event, Sampling, Scheme
from sordino.privacy.words import epsilon_in_words

SIMULATION = "simulation: keyed streams, no secret noise"
ADJACENCY = {
    Adjacency.ZERO_OUT: "one {unit}'s contribution is erased; the number of {units} is public",
    Adjacency.ADD_REMOVE: "one {unit} is added or removed; the number of {units} is public all the same, so this is "
    "not what holds: read it as zero-out, which costs the same",
    Adjacency.REPLACE_ONE: "one {unit} is exchanged for any other",
}
DECLARED = "rate and noise of everything released were fixed before the first release"
FILTER = (
    "rate and noise of later runs may follow from earlier releases; the filter guarantees that the budget is kept, and "
    "the spent figure is its meter, not a guarantee of its own"
)
OVERDRAWN = (
    "runs of an earlier version, declared after the account's first release, do not fit the filter that they need: the "
    "budget is NOT guaranteed, the spent figure is what the filter's meter shows, and nothing more is released"
)
NOT_COVERED = (
    "releases that are not in this ledger, and anything sent without passing the gate",
    "tuning: choosing settings, a round, a seed or a method by looking at results",
    "metrics that an observer computes on records in a simulation (client accuracy, Ψ)",
    "public facts, by declaration: number of {units}, budget, batch size, noise multipliers, who takes part",
)
TUNING = NOT_COVERED[1]
UNPAID = (
    "choosing settings, a round, a seed or a method by anything but estimates that held-out records paid for here; by "
    "those it is covered"
)
"""What stands in place of ``TUNING`` where records are held out and pay for estimates."""
SHARED_NOT_COVERED = (
    "shared noise holds while no more sites conspire with the server than it says, in all runs together: beyond that "
    "the figures under 'If other sites conspire' hold",
    "shared noise rests on masks that hide every single message: they are as strong as the ciphers they are made of, "
    "where noise of this client's own rests on nothing but chance",
    "a person with records at several sites that share noise: what the records change adds up in the one sum, so the "
    "noise over that change is 1/z = 1/z_1 + 1/z_2 + …, which is less than each site's z says",
    "the model itself: nobody sees a single update, so one site can spoil it unseen",
)
"""What shared noise does not cover, for the statements of clients that took part in it."""
ELSEWHERE = (
    "what other sites release about a {unit} who has records there too: the promise is made by each site for its own "
    "records"
)
"""What is said of persons and not of records: they may have records at several sites."""
PARTS = {"training": "training {units}", "held out": "held-out {units}"}
PLACES = "places in a file"
SEVERAL = (2, 3)
"""At how many sites somebody's records may be, of those that a statement tells."""
SHOWN = 8
"""Numbers of colluders that a statement lists at most."""


def words_of(unit: str) -> dict[str, str]:
    """The word for a unit, and for several."""
    return {"unit": unit, "units": f"{unit}s"}


def protected(unit: str) -> str:
    """What is protected as one, in words."""
    return f"one {unit} of this client" + ("" if unit == RECORD else ", with all of its records here")


def several_sites(ledger: Ledger, names: list[str]) -> dict[str, list[dict[str, Any]]]:
    """By client whose units are persons: ε for one with records at 2, 3, … sites that released what this one did.

    Noise per site: k times the releases. Noise shared: what the records change adds up in the one sum, so a release of
    multiplier z counts as one of z/k, from a batch that has any of them with probability 1 − (1 − q)^k.
    """
    whose = {n: ledger.account(n) for n in names}
    asked = [
        n
        for n, one in whose.items()
        if one.budget.unit != RECORD
        and not (one.budget.is_public or one.not_private or ledger.rests_on_filter(n))
        and ledger.spent(n)
    ]
    found: dict[str, list[dict[str, Any]]] = {n: [] for n in asked}
    for k in SEVERAL if asked else ():
        events = [[_at_sites(e, k) for e in ledger.spent(n)] for n in asked]
        costs = accounting.composed_epsilon(events, [whose[n].budget.delta for n in asked])
        for n, cost in zip(asked, costs):
            found[n].append({"sites": k, "epsilon": number(float(cost))})
    return found


def _at_sites(event: Event, sites: int) -> Event:
    if event.shared is None:
        return event.times(event.count * sites)
    any_of = Sampling(event.sampling.scheme, 1.0 - (1.0 - event.sampling.rate) ** sites)
    return replace(event, noise=event.noise / sites, sampling=any_of)


def statement(ledger: Ledger, client: str) -> dict[str, Any]:
    """Everything the ledger knows about one client's spending, as plain values; infinity is None.

    ``spent_epsilon`` is None when nothing is guaranteed: noise 0, or an account marked NOT PRIVATE (then
    ``nominal_epsilon`` still gives what the recorded noise would cost if it were secret).
    """
    return export(ledger, [client])["statements"][0]  # type: ignore[no-any-return]


def export(ledger: Ledger, clients: list[str] | None = None) -> dict[str, Any]:
    """The statements of all clients (or of these) and the chain's head, ready for JSON."""
    names = [account.client for account in ledger.accounts()] if clients is None else clients
    entries, head = ledger.head
    costs, together, parts = ledger.epsilon(names), _together(ledger, names), _parts(ledger, names)
    views = {name: one and one.told() for name, one in attacks(ledger, names).items()}
    levels = levels_of(ledger, names)
    beside = several_sites(ledger, names)
    return {
        "schema": 1,
        "ledger": {"file": ledger.path.name, "entries": entries, "head": head},
        "statements": [
            _statement(ledger, client, costs[client], together.get(client), parts.get(client))
            | {"levels": levels.get(client), "several_sites": beside.get(client, []), "attack": views[client]}
            for client in names
        ],
    }


def _parts(ledger: Ledger, names: list[str]) -> dict[str, dict[str, Any]]:
    """By client with held-out records, under both names: what its two accounts have spent, and how they were parted."""
    known = {account.client for account in ledger.accounts()}
    own = {ledger.account(name).owner or (twin(name) if is_held(name) else name) for name in names}
    trained: dict[str, list[str]] = {name: [] for name in own}
    for account in ledger.accounts():
        whose = account.owner or account.client
        if whose in trained:
            trained[whose].append(account.client)
    both = sorted(name for name in own if trained[name] and twin(name) in known)
    if not both:
        return {}
    costs = ledger.epsilon([account for name in both for account in (*trained[name], twin(name))])
    costs, parted = (
        {name: math.inf if ledger.account(name).not_private else cost for name, cost in costs.items()},
        ledger.parted(),
    )
    found: dict[str, dict[str, Any]] = {}
    for name in both:
        most = max(costs[account] for account in trained[name])
        figures = {
            "training_epsilon": number(most),
            "held_epsilon": number(costs[twin(name)]),
            "larger_epsilon": number(max(most, costs[twin(name)])),
            "levels": trained[name] != [name],
            "share": None if parted is None else parted.share,
            "by": None if parted is None else parted.ids or PLACES,
            "since": None if parted is None else parted.time,
        }
        found |= {account: {**figures, "part": "training"} for account in trained[name]}
        found[twin(name)] = {**figures, "part": "held out"}
    return found


def _together(ledger: Ledger, names: list[str]) -> dict[str, dict[str, Any]]:
    """By client that ever shared noise: the two kinds of promise apart, and what other numbers of colluders leave."""
    sites = {name: _most_sites(ledger, name) for name in names}
    sharing = [name for name in names if sites[name] > 1 and not ledger.account(name).budget.is_public]
    if not sharing:
        return {}
    own = ledger.own_epsilon(sharing)
    against = {count: ledger.epsilon_against(count, sharing) for count in _counts(ledger, sharing)}
    found = {}
    for name in sharing:
        alone, shared = ledger.epsilon_by_trust(name)
        counts = [count for count in against if count < sites[name] - 1]
        found[name] = {
            "colluders": ledger.against(name).colluders,
            "own_noise_epsilon": alone,
            "shared_noise_epsilon": shared,
            "own_epsilon": own[name],
            "against": [{"colluders": count, "epsilon": number(against[count][name])} for count in counts],
        }
    return found


def _most_sites(ledger: Ledger, client: str) -> int:
    """The most sites that any sum with the client's noise had; 0 where it always added all of its own."""
    return max((e.shared.sites for e in ledger.spent(client) if e.shared is not None), default=0)


def _counts(ledger: Ledger, names: list[str]) -> list[int]:
    """Numbers of colluders to show: every one where they are few, else evenly many, with those that were promised."""
    most = max(_most_sites(ledger, name) for name in names) - 1
    promised = {ledger.against(name).colluders or 0 for name in names}
    step = math.ceil(most / SHOWN)
    return sorted({*range(0, most, step), most - 1, *(count for count in promised if count < most)})


def _statement(
    ledger: Ledger, client: str, nominal: float, together: dict[str, Any] | None, parts: dict[str, Any] | None
) -> dict[str, Any]:
    account, standings = ledger.account(client), ledger.standings(client)
    budget, private = account.budget, not account.not_private
    of = words_of(budget.unit)
    spent = nominal if private else math.inf
    schemes = sorted({str(e.sampling.scheme) for s in standings for e in s.plan.turn})
    labels = [accounting.label(account.accountant, scheme) for scheme in schemes or [str(Scheme.POISSON)]]
    bindings = [] if account.simulated else ledger.bindings()
    covered = FILTER if ledger.rests_on_filter(client) else DECLARED
    if together is not None:
        figures = ("own_noise_epsilon", "shared_noise_epsilon", "own_epsilon")
        together = {**together, **{key: number(together[key] if private else math.inf) for key in figures}}
        together["against"] = together["against"] if private else []
    return {
        "client": client,
        "unit": protected(budget.unit),
        "unit_name": budget.unit,
        "adjacency": str(budget.adjacency),
        "adjacency_in_words": ADJACENCY[budget.adjacency].format(**of),
        "epsilon": number(budget.epsilon),
        "opened_epsilon": number(account.opened.epsilon),
        "delta": budget.delta,
        "spent_epsilon": number(spent),
        "nominal_epsilon": number(nominal),
        "left_epsilon": number(budget.epsilon if budget.is_public else max(0.0, budget.epsilon - spent)),
        "replace_one_epsilon": number(ledger.replace_one_epsilon(client) if private else math.inf),
        "trust": ledger.trust(client),
        "shared_noise": together,
        "composition": ledger.composition(client),
        "composition_in_words": OVERDRAWN if ledger.overdrawn(client) else covered,
        "accountant": account.accountant,
        "accountant_in_words": "; ".join(dict.fromkeys(labels)),
        "sampling": schemes,
        "public": budget.is_public,
        "private": private,
        "not_private": list(account.not_private),
        "simulated": account.simulated,
        "releases": [release for s in standings for release in _releases(s)],
        "studies": [named(s) for s in standings],
        "open_plans": [_open_plan(s) for s in standings if s.open],
        "top_ups": [_told(one, "time", "epsilon", "reason", "officer") for one in account.top_ups],
        "bindings": [_told(one, "time", "site", "commitment", "reason", "officer") for one in bindings],
        "since": account.since,
        "held_out": parts,
        "living": lives(ledger, client),
        "not_covered": [
            *(UNPAID if parts is not None and one is TUNING else one.format(**of) for one in NOT_COVERED),
            *(() if budget.unit == RECORD else (ELSEWHERE.format(**of),)),
            *(() if together is None else SHARED_NOT_COVERED),
        ],
    }


def _told(event: TopUp | Binding, *fields: str) -> dict[str, Any]:
    return {name: getattr(event, name) for name in fields}


def _releases(standing: Standing) -> list[dict[str, Any]]:
    return [
        {
            "run": standing.plan.run,
            "what": e.what,
            "sampling": str(e.sampling.scheme),
            "rate": e.sampling.rate,
            "noise": number(e.noise),
            "count": e.count,
            **({} if e.shared is None else {"shared": _sharing(e.shared)}),
        }
        for e in standing.events(standing.used)
    ]


def _sharing(shared: Shared) -> dict[str, Any]:
    told = {"sites": shared.sites, "colluders": shared.colluders, "dropouts": shared.dropouts}
    return {**told, "trust": shared.words()}


def _open_plan(standing: Standing) -> dict[str, Any]:
    return {
        "run": standing.plan.run,
        "turns": standing.plan.turns,
        "payable_turns": standing.payable,
        "used": {e.what: standing.used.get(e.what, 0) for e in standing.plan.turn},
        "caps": standing.caps,
    }


def statement_text(told: dict[str, Any]) -> str:
    """A statement, as ``statement`` gives it, in plain words."""
    of = words_of(told["unit_name"])
    part = "" if told["held_out"] is None else f", {PARTS[told['held_out']['part']].format(**of)}"
    whose = twin(told["client"]) if part and is_held(told["client"]) else told["client"]
    if told["levels"] is not None:
        whose, part = told["levels"]["of"], f"{part or ', ' + of['units']} of level {told['levels']['level']}"
    lines = [f"Privacy statement of client {whose}{part}"]
    if not told["private"]:
        lines += ["", "NOT PRIVATE: " + "; ".join(told["not_private"])]
    if told["simulated"]:
        lines += ["", f"This is a {SIMULATION}. It protects nobody; it shows what a deployment would spend."]
    lines += ["", *figures_in_words(told), *levels_in_words(told["levels"], of["unit"], of["units"])]
    lines += [*_parts_in_words(told["held_out"], of), *_together_in_words(told)]
    known = titles(told)
    lines += [*_beside_in_words(told), *lives_in_words(told["living"], of, known), "", "Released so far:"]
    lines += [f"  {known[r['run']]}: {release_in_words(r, told['unit_name'])}" for r in told["releases"]] or [
        "  nothing"
    ]
    sections = {
        "Planned and still open:": [f"{known[p['run']]}: {plan_in_words(p)}" for p in told["open_plans"]],
        "Budget raised:": [
            f"{t['time']}: by {t['epsilon']:.6g}, approved by {t['officer']}: {t['reason']}" for t in told["top_ups"]
        ],
        "Whose ledger this is:": [
            f"{one['time']}: site {one['site']}, records {one['commitment'][:16]}…"
            + (f", approved by {one['officer']}: {one['reason']}" if one["officer"] else "")
            for one in told["bindings"]
        ],
        "What cannot be taken back:": [] if told["living"] is None else [f"- {one.format(**of)}" for one in KEPT],
        "Not covered by this statement:": [f"- {item}" for item in told["not_covered"]],
    }
    for title, items in sections.items():
        if items:
            lines += ["", title, *(f"  {item}" for item in items)]
    return "\n".join(lines) + "\n"


def figures_in_words(told: dict[str, Any]) -> list[str]:
    """What is protected, under which notion of neighbours, how much was spent and is left: a line for each."""
    spent, replaced, left = (told[name] for name in ("spent_epsilon", "replace_one_epsilon", "left_epsilon"))
    budget = "none: the data are public" if told["public"] else f"epsilon {told['epsilon']:.6g}"
    secret = "" if told["private"] else f" ({epsilon_in_words(told['nominal_epsilon'])} if the noise had been secret)"
    unclaimed = "not claimed (the filter bounds its own notion of neighbours only)"
    exchange = unclaimed if replaced is None and spent is not None else f"epsilon {epsilon_in_words(replaced)}"
    return [
        f"Protected unit:  {told['unit']}",
        f"Neighbours:      {told['adjacency']} ({told['adjacency_in_words']})",
        f"Sampling:        {', '.join(told['sampling']) or 'nothing sampled yet'}",
        f"Accountant:      {told['accountant']}: {told['accountant_in_words']}",
        f"Composition:     {told['composition']}: {told['composition_in_words']}",
        f"Budget:          {budget}, delta {told['delta']:.6g}",
        f"Spent:           epsilon {epsilon_in_words(spent)}{secret}",
        *([] if spent is None else [f"  that holds {told['trust']}"]),
        f"  the same under replace-one: {exchange}",
        *attack_in_words(told.get("attack"), told["unit_name"]),
        f"Left:            {'no limit' if left is None else f'epsilon {math.floor(left * 1e4) / 1e4:.6g}'}",
    ]


def _beside_in_words(told: dict[str, Any]) -> list[str]:
    """What holds for somebody with records at several sites, if the others released as much as this one."""
    if not told["several_sites"]:
        return []
    lines = ["", f"A {told['unit_name']} with records at several sites, if each released what this one did:"]
    for one in told["several_sites"]:
        where = f"{spelt(one['sites'])} sites"
        lines.append(f"  {where:<18} epsilon {epsilon_in_words(one['epsilon'])}")
    return lines


def _parts_in_words(parts: dict[str, Any] | None, of: dict[str, str]) -> list[str]:
    """Two accounts under one budget: what each has spent, which holds for whom, and how records were parted."""
    if parts is None:
        return []
    spent = {key: epsilon_in_words(parts[f"{key}_epsilon"]) for key in ("training", "held", "larger")}
    how, most = "by the seed of the simulation", " at most, by level" if parts["levels"] else ""
    if parts["share"] is not None:
        known = "by their places in one file" if parts["by"] == PLACES else f"by their ids, column {parts['by']}"
        how = f"a share of {parts['share']:g}, {known}, since {parts['since']}, for ever"
    return [
        "",
        "Two accounts under one budget:"
        if not parts["levels"]
        else f"Training and held-out {of['units']} have accounts apart:",
        f"  training {of['units']}:  epsilon {spent['training']}{most}; the model learns from them",
        f"  held-out {of['units']}:  epsilon {spent['held']}; they train nothing, the model is judged by them",
        f"  A {of['unit']} is in one of the two for ever and spends nothing of the other, so its epsilon is that of"
        " its own",
        f"  account; for any {of['unit']}, not knowing which it is in, the larger holds: epsilon {spent['larger']}.",
        f"  Held out: {how}.",
    ]


def _together_in_words(told: dict[str, Any]) -> list[str]:
    """The two kinds of promise side by side, and what is left of them if more or fewer sites conspire."""
    kinds = told["shared_noise"]
    if kinds is None:
        return []
    own = kinds["own_noise_epsilon"]
    lines = [
        "",
        "Two kinds of promise:",
        f"  noise of its own:  {'nothing released' if own == 0 else f'epsilon {epsilon_in_words(own)}, {EVERYBODY}'}",
        f"  noise shared:      epsilon {epsilon_in_words(kinds['shared_noise_epsilon'])}, {told['trust']}",
        f"  both together:     epsilon {epsilon_in_words(told['spent_epsilon'])}, {told['trust']}",
        "",
        "If other sites conspire with the server:",
    ]
    for one in kinds["against"]:
        who = spelt(one["colluders"]) if one["colluders"] else "none of them"
        planned = "  (as promised)" if one["colluders"] == kinds["colluders"] else ""
        lines.append(f"  {who:<18} epsilon {epsilon_in_words(one['epsilon'])}{planned}")
    return [*lines, f"  {'all of them':<18} epsilon {epsilon_in_words(kinds['own_epsilon'])}"]


def release_in_words(release: dict[str, Any], unit: str = RECORD) -> str:
    """One kind of release of a statement: what, how often, from which records, under how much noise."""
    drawn = {
        Scheme.POISSON: f"each {unit} drawn with probability {release['rate']:.6g}",
        Scheme.FIXED: f"a fixed {release['rate']:.6g} of the {unit}s drawn without replacement",
        Scheme.FULL: f"all {unit}s used",
    }[Scheme(release["sampling"])]
    z = release["noise"]
    noise = "without noise" if z == 0 else f"noise {'infinite' if z is None else f'{z:.6g}'} times the sensitivity"
    if "shared" in release:
        noise += f" (shared by {release['shared']['sites']} sites, {release['shared']['trust']})"
    return f"{release['what']}, {release['count']} times, {drawn}, {noise}"


def plan_in_words(plan: dict[str, Any]) -> str:
    """How much of an open plan can be paid, and was used."""
    caps = plan["caps"]
    parts = [
        f"{what} {used} of {'any number' if caps is None else f'at most {caps[what]}'}"
        for what, used in plan["used"].items()
    ]
    turns = f"{plan['payable_turns']} of {plan['turns']} turns can be paid"
    return f"{turns}; used: {', '.join(parts)}"
