"""Plans for whoever is alive: made ahead in a child process, at once when they are needed now.

`exec` does not know how to plan. It is handed a planner, a function importable by name, and calls it in child
processes, so that heartbeats never wait for a solver: one child works through the likely vectors, the other answers
what is wanted this moment. Only what no child answers is planned in a thread of this process. Plans are kept by failure
vector and used in the names of the processes that are alive, so that every survivor keeps its position and what is
re-routed is what the dead worker was home to. Where peers are not alike a vector does not say enough, and plans are
made for the dead processes themselves.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path

from recycle.errors import RecycleError, RunError, ScheduleError
from recycle.exec.membership.interfaces import Ready
from recycle.exec.planning.planner_process import Planner, PlannerAnswer, PlannerProcess, Question, answer
from recycle.exec.processes.waker import Waker
from recycle.exec.protocol import StepMode
from recycle.files import write_whole
from recycle.ir.check import check, require_no_errors
from recycle.ir.lower import with_barrier
from recycle.ir.schedule import Schedule, loop_placement
from recycle.ir.simulate import simulate
from recycle.job import PricedJob
from recycle.plans import Plan, Vector, failure_vector, likely_vectors, schedule_hash, with_updates_of
from recycle.plans.hosting import Hosts, layers_of, stages_by_rank
from recycle.plans.replaying import rotation_of, with_room
from recycle.pricing import byte_limit, profile_of_layout
from recycle.profile import Profile
from recycle.runs import plan_file
from recycle.shape import Worker


class PlanService:
    """Plans of one run, by failure vector.

    Args:
        job: what to plan for.
        planner: see `Planner`; None when only `schedule` shall run.
        directory: plan files in use are written here as `<hash>.json`.
        waker: is woken when a plan has been made.
        warn: is told of what cannot be kept.
        schedule: a schedule of the user's own, for the set of workers that it leaves alive.
    """

    def __init__(
        self,
        job: PricedJob,
        planner: Planner | None,
        directory: Path,
        waker: Waker,
        schedule: Schedule | None = None,
        warn: Callable[[str], object] = lambda message: None,
    ) -> None:
        self._job, self._directory, self._warn = job, directory, warn
        self._own = schedule
        # Who hosts what in another way than the planner does it, alike for all workers of a rank, goes on doing so.
        usual = schedule is None or schedule.placement == loop_placement(job.shape) or stages_by_rank(schedule) is None
        self._like = None if usual else schedule
        self._planner, self._waker = planner, waker
        self._by_vector = job.prices.are_peers_alike
        self._plans: dict[_Key, Plan] = {}
        self._used: dict[frozenset[Worker], Ready] = {}
        self._rerouted: dict[Question, Ready] = {}
        self._hosts: dict[str, Hosts] = {}
        self._errors: dict[_Key, str] = {}
        self._answers: queue.SimpleQueue[PlannerAnswer] = queue.SimpleQueue()
        self._asked: set[_Key] = set()
        self._background = self._urgent = None
        self._other: PlannerProcess | None = None
        self._children: list[PlannerProcess] = []
        self._wanted: list[Question] = []
        self._answered: list[PlannerAnswer] = []
        self._usual = Hosts.at_start(job, None)
        if planner is not None:
            self._background, self._urgent = self._child(planner, self._likely()), self._child(planner)

    def _child(self, planner: Planner, questions: Iterable[Question] = ()) -> PlannerProcess:
        self._children.append(PlannerProcess(self._job, planner, self._answers, self._waker, self._like, questions))
        return self._children[-1]

    def look(self) -> None:
        """See to it that whatever was asked is answered; to be called again and again.

        What is wanted this moment and no child has answered is planned here, without a search, in a thread.
        """
        for child in self._children:
            for question in child.look():
                if question.quick:
                    self._warn("no planner process answers; a plan that is needed now is made by the coordinator")
                    threading.Thread(target=self._plan_here, args=(question,), daemon=True).start()
                elif question in self._wanted or question.moves:
                    self._answers.put((question, "", "no planner process answers"))

    def _plan_here(self, question: Question) -> None:
        assert self._planner is not None
        self._answers.put((question, *answer(self._planner, self._job, self._like, question)))
        self._waker.wake()

    def _likely(self) -> Iterator[Question]:
        """What to plan ahead for; where peers are not alike, no failure and each single one."""
        shape, ahead = self._job.shape, self._job.planner.ahead
        if self._by_vector:
            most = shape.ranks * (shape.pipelines - 1)
            yield from (Question(vector) for vector in likely_vectors(shape, min(ahead, most)))
            return
        for failures in range(min(ahead, 1) + 1):
            for failed in combinations(shape.workers(), failures):
                if shape.pipelines > failures:
                    yield self._question(frozenset(failed))

    def _question(self, failed: frozenset[Worker], quick: bool = False) -> Question:
        names = None if self._by_vector else tuple(map(str, sorted(failed)))
        return Question(failure_vector(self._job.shape, failed), quick, names)

    def ready(self, failed: frozenset[Worker]) -> Ready | None:
        """The plan without the failed workers; None while it is being made. Raises RunError if none can be made."""
        if failed in self._used:
            return self._used[failed]
        if self._own is not None and self.is_own(failed):
            return self._use(failed, self._own, None)
        self._collect()
        question = self._question(failed, quick=True)
        if max(question.vector) >= self._job.shape.pipelines and self._job.planner.layout == "elastic":
            # Others may hold what the workers of a rank held, all of which are dead.
            question = Question(question.vector, False, tuple(map(str, sorted(failed))), moves=True)
        plan = self._planned(question)
        if plan is None:
            return None
        plan = plan if question.failed is not None else plan.for_processes(failed)
        return self._use(failed, plan.schedule, plan)

    def rerouted(self, failed: frozenset[Worker], digest: str) -> Ready | None:
        """The plan without the failed workers in the layout of a plan in use: every worker hosts what it hosts there.

        None while it is being made. Raises RunError where there is none.
        """
        self._collect()
        names, file = tuple(map(str, sorted(failed))), str(plan_file(self._directory, digest).resolve())
        question = Question(failure_vector(self._job.shape, failed), True, names, within=file)
        if question not in self._rerouted and (plan := self._planned(question)) is not None:
            try:
                self._rerouted[question] = self.prepare(plan.schedule, plan, self._job.prices)
            except RecycleError as refusal:
                raise RunError(f"no plan for the layout at hand: {refusal}") from None
        return self._rerouted.get(question)

    def layout_file(self, ready: Ready) -> str | None:
        """The file of a plan in use, if it cuts the model and is kept."""
        if ready.hosts is None or not ready.hosts.cut or not ready.is_kept:
            return None
        return str(plan_file(self._directory, ready.digest).resolve())

    def _planned(self, question: Question) -> Plan | None:
        """What has been answered of what is needed now; None while it is being made. Raises RunError if it cannot."""
        key, vector = _key(question), question.vector
        if key in self._plans:
            return self._plans[key]
        if key in self._errors:
            raise RunError(f"no plan for {vector} dead workers per stage: {self._errors[key]}")
        if self._urgent is None:
            raise RunError(f"no plan for {vector} dead workers per stage, and no planner was given")
        if key not in self._asked:
            self._asked.add(key)
            self._urgent.ask(question)
        return None

    def is_own(self, failed: frozenset[Worker]) -> bool:
        """Whether the user's own schedule runs without these workers."""
        return self._own is not None and self._own.failed == failed

    @property
    def can_plan(self) -> bool:
        """Whether plans for other times can be made: by a planner, for stages that lie where it puts them."""
        return self._planner is not None and self._like is None

    def ask(self, question: Question) -> None:
        """Ask for a plan with another profile or layout, which nobody waits for; `answers` has it once it is there.

        The background child makes it if it has nothing else to do, else a third one: the urgent one stays free.
        """
        assert self._planner is not None
        assert self._background is not None
        child = self._background
        if child.is_busy:
            self._other = self._other or self._child(self._planner)
            child = self._other
        self._wanted.append(question)
        child.ask(question)

    @property
    def is_busy(self) -> bool:
        """Whether something is still to be answered."""
        return any(child.is_busy for child in self._children)

    def is_moved(self, hosts: Hosts) -> bool:
        """Whether somebody hosts other parts of the model than the planner of the given stages has it."""
        usual = self._usual
        return bool(hosts.cut) or any(usual.stages[worker] != stages for worker, stages in hosts.stages.items())

    def answers(self, drifted: bool) -> list[PlannerAnswer]:
        """What has been answered of what was asked with `ask`, for other times or for the job's own; each once."""
        self._collect()
        answered = [answer for answer in self._answered if (answer[0].profile is not None) == drifted]
        self._answered = [answer for answer in self._answered if answer not in answered]
        return answered

    def _collect(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                question, text, error = self._answers.get_nowait()
                key = _key(question)
                if question in self._wanted:
                    self._wanted.remove(question)
                    self._answered.append((question, text, error))
                elif error:
                    self._errors.setdefault(key, error)
                else:
                    self._plans[key] = Plan.from_text(text, f"plan for {question.vector}")
                    self._errors.pop(key, None)

    def _use(self, failed: frozenset[Worker], schedule: Schedule, plan: Plan | None) -> Ready:
        self._used[failed] = self.prepare(schedule, plan, self._job.prices)
        return self._used[failed]

    def prepare(self, schedule: Schedule, plan: Plan | None, profile: Profile) -> Ready:
        """No schedule reaches a worker unchecked, wherever it comes from. Its periods are those under `profile`."""
        schedule = with_updates_of(schedule, self._job)
        require_valid(schedule, self._job)
        schedule = with_room(schedule, self._job)
        rotation = rotation_of(schedule, self._job)
        if rotation is not None:
            require_valid(rotation.whole, self._job)  # what runs in an iteration is this without some replays
        profile = profile_of_layout(self._job, profile, schedule.shape)
        periods: dict[StepMode, float] = {"barrier": simulate(with_barrier(schedule), profile).period}
        if schedule.optimizer == "staggered":
            periods["staggered"] = simulate(schedule, profile).period
        text = schedule.dumps() if plan is None else replace(plan, schedule=schedule).text()
        digest, is_kept = schedule_hash(schedule), True
        try:
            write_whole(plan_file(self._directory, digest), text)
        except RecycleError as error:
            is_kept = False
            self._warn(f"a plan in use is not kept, and goes through the store: {error}")
        rounds = 0 if rotation is None else rotation.rounds
        if self._job.integrity.every and not rounds:
            self._warn(
                f'[integrity] every = "gaps": plan {digest} has no gap that holds a replay: nothing is replayed while'
                f" it runs, and states are compared every {self._job.compared_every(0)} iterations; write every = N to"
                " replay all the same"
            )
        hosts = self._hosts[digest] = Hosts.of_schedule(self._job, schedule)
        return Ready(digest, text, {worker: worker for worker in schedule.live}, periods, is_kept, hosts, rounds)

    def hosts(self, digest: str) -> Hosts | None:
        """Who hosts what by the plan with this hash, if it was in use here or the directory holds it."""
        if digest not in self._hosts:
            with contextlib.suppress(RecycleError):
                schedule = Schedule.load(plan_file(self._directory, digest))
                if schedule_hash(schedule) == digest:
                    self._hosts[digest] = Hosts.of_schedule(self._job, schedule)
        return self._hosts.get(digest)

    def adopt(self, failed: frozenset[Worker], digest: str) -> None:
        """Take up the plan that the coordinator before used without the failed workers, if the directory holds it."""
        with contextlib.suppress(RecycleError):
            schedule = Schedule.load(plan_file(self._directory, digest))
            if schedule_hash(schedule) == digest and schedule.failed == failed:
                self._use(failed, schedule, None)

    def close(self) -> None:
        """End the children."""
        for child in self._children:
            child.close()


_Key = tuple[Vector, tuple[str, ...] | None, bool, str | None]


def _key(question: Question) -> _Key:
    return question.vector, question.failed, question.moves, question.within


def require_valid(schedule: Schedule, job: PricedJob) -> None:
    """Raise ScheduleError with the first error that `check` finds."""
    shape = schedule.shape
    if replace(shape, cut=()) != job.shape:
        raise ScheduleError(f"the schedule is for {shape}, the job for {job.shape}")
    layers = layers_of(job)
    if shape.cut and sum(shape.cut) != sum(layers):
        raise ScheduleError(
            f"the schedule cuts a model of {sum(shape.cut)} layers, the job's has {sum(layers)}; plan it for this job"
        )
    if schedule.forward_only:
        raise ScheduleError(
            "the schedule is forward-only and trains nothing; [eval] makes such ones of that of training"
        )
    profile, limits, room = profile_of_layout(job, job.prices, shape), job.limits, None
    if shape.cut and (room := byte_limit(job, job.prices)) is not None:
        limits = None  # what a worker may hold in activations follows from the stages that it hosts
    require_no_errors(check(schedule, profile=profile, limits=limits, byte_limit=room))
    require_no_errors(check(with_barrier(schedule), profile=profile, limits=limits, byte_limit=room, about_to_run=True))
