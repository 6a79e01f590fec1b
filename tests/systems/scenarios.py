"""Scenarios for tests of systems (stages of whole layers, whole times), and the facts of changes."""

from collections.abc import Iterable

from recycle import Job
from recycle.job import price
from recycle.job.layers import Layer
from recycle.systems import Change, Scenario
from recycle.systems.failures import FailureTrace, NodeChange
from recycle.systems.system import Nodes, System


def scenario(pipelines: int, ranks: int, micro_batches: int, layers: int | None = None, **other) -> Scenario:
    """A scenario of equal layers, one per rank by default, F = I = W = 1; `other` are attributes of Scenario, and
    `layer` are attributes of its layers."""
    text = f"[shape]\npipelines = {pipelines}\nranks = {ranks}\nmicro_batches = {micro_batches}\n"
    if layers is not None:
        split = [layers // ranks + (rank < layers % ranks) for rank in range(ranks)]
        text += f"[model]\nlayers = {layers}\nsplit = {split}\n"
    layer = Layer(**{"forward": 1.0, "backward_input": 1.0, "backward_weight": 1.0, **other.pop("layer", {})})
    other.setdefault("node_of", tuple(range(pipelines * ranks)))
    return Scenario(price(Job.from_toml(text)), (layer,) * (ranks if layers is None else layers), **other)


def nodes(text: str) -> Nodes:
    """The nodes in "0-3 7"."""
    ends = [[int(end) for end in part.split("-")] for part in text.split()]
    return frozenset(node for part in ends for node in range(part[0], part[-1] + 1))


def trace(scenario: Scenario, end: float, *failures: tuple[float, str]) -> FailureTrace:
    """Times at which nodes die, for good."""
    changes = tuple(NodeChange(time, nodes(dead), frozenset()) for time, dead in failures)
    return FailureTrace("test", scenario.nodes, scenario.all_nodes, changes, end)


class Play:
    """A system, and its state.

    Args:
        alive: nodes that it begins with; all when left out.
    """

    def __init__(self, system: System, alive=""):
        self.system = system
        self.state = system.begin(nodes(alive) if alive else self.system.scenario.all_nodes)
        self.period = getattr(self.state, "period", None)

    def change(self, dead="", joined="") -> Change:
        """These nodes die and those come; neither is a boundary at which it may reconsider."""
        change = self.system.change(self.state, nodes(dead), nodes(joined))
        self.state = change.state
        return change

    def facts(self, change: Change) -> dict[str, str]:
        """The facts of a change, its costs and its state as text, with ; for each comma."""
        state = vars(change.state)
        pipelines = [getattr(pipeline, "hosts", pipeline) for pipeline in state.get("pipelines", ())]
        values = {
            **change.pause.by_cause(),
            **state,
            "seconds": change.pause.seconds,
            **{name: getattr(change, name) for name in ("event", "bytes")},
            "loss": change.loss.value,
            "live": _ranges(change.state.live),
            "sizes": sorted(map(len, pipelines)),
            "pipelines": " ".join("".join(map(str, pipeline)) for pipeline in pipelines),
            "used": _ranges(state["slots"].values() if "slots" in state else state.get("used", ())),
            "speed": "as begun" if state.get("period") == self.period else "another",
            "runs": "period" in state,
        }
        texts = {name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in values.items()}
        return {name: text.replace(",", ";") for name, text in texts.items()}

    def play(self, *steps: str):
        """Steps as "-2 -3: event=fatal, idle=2": nodes that die (-2) and come (+2), none at a boundary, or "begin", and
        facts that are expected of the change."""
        for step in steps:
            text, _, expected = step.partition(": ")
            words = text.strip(":").split()
            change = Change(state=self.state)
            if words != ["begin"]:
                change = self.change(*(" ".join(word[1:] for word in words if word[0] == sign) for sign in "-+"))
            facts = self.facts(change)
            for fact in filter(None, expected.split(", ")):
                name, _, value = fact.partition("=")
                assert (text, name, facts.get(name)) == (text, name, value)


def _ranges(numbers: Iterable[int]) -> str:
    ordered = sorted(numbers)
    begins = [n for n in ordered if n - 1 not in ordered]
    ends = [n for n in ordered if n + 1 not in ordered]
    return " ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(begins, ends, strict=True))
