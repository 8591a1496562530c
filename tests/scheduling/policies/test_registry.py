"""What users write for a policy: what it means, and what is said when it means none."""

from __future__ import annotations

import pathlib

import pytest

from jaxserve import LLM, EngineConfig, simulate
from jaxserve.core import Event
from jaxserve.executors.cost_model import LinearCost
from jaxserve.scheduling.policies import (
    POLICIES,
    Policy,
    bounded_wait,
    chain,
    fair_share,
    fcfs,
    get_policy,
    mlfq,
    priority,
    sjf,
    split_specs,
    srpt,
)
from jaxserve.scheduling.predictors import history
from jaxserve.testing import check_policy
from tests.scheduling.policies.views import BLANK, ranked, views

MINE = '''"""Mine."""

from __future__ import annotations

import dataclasses

from jaxserve.scheduling.policies import fcfs

CONSTANT = 3
made = fcfs()


@dataclasses.dataclass(frozen=True)
class State:
    """Dataclasses look their module up."""

    seen: int = 0


def by_length(sign: int = 1):
    """Shortest first, or longest."""
    return fcfs()._replace(
        init=State,
        rank=lambda state, view, now_s: (0, (sign * view.prompt_tokens,)),
    )


def no_policy():
    """Forgets to return."""
'''


@pytest.fixture
def mine(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A user's file in a folder of the current directory's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "below").mkdir()
    for folder in (tmp_path, tmp_path / "below"):
        (folder / "my_file.py").write_text(MINE)
    (tmp_path / "fails.py").write_text("import no_such_package_at_all\n")
    (tmp_path / "broken.py").write_text("def policy(:\n")
    return tmp_path


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list:
    """The arguments that a policy called `probe` was made with."""
    calls: list = []

    def probe(first=None, *rest, x=0) -> Policy:
        calls.append((first, rest, x))
        return fcfs()

    monkeypatch.setitem(POLICIES, "probe", probe)
    return calls


LENGTHS = views(a={"prompt_tokens": 5}, b={"prompt_tokens": 2}, c={"prompt_tokens": 9})


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_has_a_spec(name: str) -> None:
    more = {
        "bounded_wait": "(fcfs, 3)",
        "chain": "(priority, fcfs)",
        "sjf": ":history",
        "srpt": ":history",
    }
    policy = get_policy(name + more.get(name, ""))
    klass, order = policy.rank(policy.init(), BLANK, 0.0)
    assert (klass, order) <= (klass, order)


def test_the_known_names() -> None:
    assert set(POLICIES) == {
        *("bounded_wait", "chain", "edf", "fair_share", "fcfs", "hrrn", "mlfq"),
        *("prefix_affinity", "prefix_sjf", "priority", "sjf", "srpt"),
    }


@pytest.mark.parametrize(
    ("spec", "arguments"),
    [
        ("probe", (None, (), 0)),
        (" probe ( ) ", (None, (), 0)),
        ("probe(x=-1.5)", (None, (), -1.5)),
        (
            "probe((1, 2), 'a,b)', [True], x={'k': None})",
            ((1, 2), ("a,b)", [True]), {"k": None}),
        ),
    ],
)
def test_arguments_are_literals(called: list, spec: str, arguments: tuple) -> None:
    get_policy(spec)
    assert called == [arguments]


def test_arguments_reach_the_policy() -> None:
    view = BLANK._replace(priority=2)
    for spec in ("priority(10)", "priority(aging_s=10)", "chain(priority(10), fcfs)"):
        policy = get_policy(spec)
        assert policy.rank(policy.init(), view, 10.0)[0] == 1
    policy = get_policy("priority")
    assert policy.rank(policy.init(), view, 10.0)[0] == 2


@pytest.mark.parametrize(
    "spec", ["sjf:oracle", "sjf(oracle)", "sjf:oracle(noise=0)", "sjf(oracle(0.0))"]
)
def test_a_predictor_may_stand_behind_a_colon_or_inside(spec: str) -> None:
    """The oracle is given the lengths; the shortest answer is b's, then c's."""
    policy = get_policy(spec, truth={0: 30, 1: 4, 2: 7})
    state = policy.init()
    requests = views(**{name: {"max_output_tokens": 99} for name in "abc"})
    for view in requests.values():
        data = {"index": view.index, "arrival_s": view.arrival_s}
        events = [Event("arrived", 0.0, None, data)]
        state, _ = policy.update(state, events, lambda i: list(requests.values())[i])
    names = sorted(requests, key=lambda n: policy.rank(state, requests[n], 0.0))
    assert names == ["b", "c", "a"]


@pytest.mark.parametrize("where", ["my_file", "my_file.py", "below/my_file.py"])
def test_a_policy_of_ones_own_needs_no_registration(mine, where: str) -> None:
    assert ranked(get_policy(f"{where}:by_length"), LENGTHS) == "bac"
    assert ranked(get_policy(f"{where}:by_length(sign=-1)"), LENGTHS) == "cab"
    assert ranked(get_policy(f"{where}:by_length(-1)"), LENGTHS) == "cab"
    assert ranked(get_policy(f"{where}:made"), LENGTHS) == "abc"
    whole = f"{mine / 'my_file.py'}:by_length"
    assert ranked(get_policy(whole), LENGTHS) == "bac"
    assert ranked(get_policy("below.my_file:by_length"), LENGTHS) == "bac"


def test_a_policy_may_come_from_any_module(mine) -> None:
    """Also if no file of the current directory is at its path."""
    policy = get_policy("jaxserve.scheduling.policies.queues:priority(aging_s=10)")
    assert policy.rank(policy.init(), BLANK._replace(priority=2), 10.0)[0] == 1


def test_a_known_name_wins_over_a_module(mine, called: list) -> None:
    (mine / "probe.py").write_text("raise AssertionError('imported')\n")
    get_policy("probe:history")
    assert len(called) == 1


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        ("", "must be a policy; known are .*'fcfs'"),
        ("best", "'best'.* is unknown.*'fcfs'.*'history'.*my_file:my_policy"),
        ("fcfs(", "must close each bracket|cannot be read"),
        ("mlfq(quanta=", "must close each bracket|cannot be read"),
        ("fcfs fcfs", "must be like fcfs.*cannot be read"),
        ("fcfs(1)", r"must call fcfs\(\); too many positional"),
        ("priority(age=1)", r"must call priority\(aging_s=None\); .*'age'"),
        ("sjf", r"must call sjf\(predictor.*'prompt_signals'\]: sjf:history"),
        ("priority(2 + 3)", r"literals.*'2 \+ 3' is none"),
        ("priority(__import__('os').getpid())", "must call names alone"),
        ("priority(open('x'))", "is unknown: no policy or predictor is called 'open'"),
        ("priority(**{'aging_s': 1})", "must name each keyword argument"),
        ("priority(*(1,))", "literals"),
        ("priority(aging_s=0)", "aging_s=0 must be a number of seconds >= 1e-6"),
        ("(1, 2)", r"gives \(1, 2\), which is no Policy"),
        ("history", "which is no Policy"),
        ("sjf:oracle", "needs the true output lengths.*truth.*history"),
        ("sjf:guess", "no policy or predictor is called 'guess'"),
        ("no_such_file:x", "tried import no_such_file, then .*/no_such_file.py, and"),
        ("no/such.py:x", "tried .*/no/such.py, and there is none; write path/to/file"),
        ("my_file:gone", r"'gone' is not among \['CONSTANT', .*'by_length'"),
        ("my_file:CONSTANT", "must name a Policy.*'CONSTANT' is a int"),
        ("my_file:made()", "must name a Policy.*'made' is a Policy"),
        ("my_file:no_policy", "gives None, which is no Policy"),
        ("my_file:by_length(1, 2)", r"must call by_length\(sign=1\)"),
        ("fails:policy", "running .*fails.py failed with .*no_such_package_at_all"),
        ("broken.py:policy", "running .*broken.py failed with SyntaxError"),
    ],
)
def test_a_spec_that_means_nothing_says_what_would(mine, spec: str, complaint) -> None:
    with pytest.raises(ValueError, match=complaint) as error:
        get_policy(spec)
    said = str(error.value)
    assert repr(spec) in said or "aging_s=0" in said or "bracket" in said


def test_what_is_not_text_is_no_spec() -> None:
    with pytest.raises(ValueError, match="must be a policy"):
        get_policy(priority())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "specs"),
    [
        ("fcfs", ["fcfs"]),
        (
            "fcfs,sjf:oracle, mlfq(quanta=(1,2)) ",
            ["fcfs", "sjf:oracle", "mlfq(quanta=(1,2))"],
        ),
        ("a(x=[1,2]),b({'k':(1,2)},'),(')", ["a(x=[1,2])", "b({'k':(1,2)},'),(')"]),
        (
            "sjf(oracle(noise=1, seed=2)),my_file:p(x=1)",
            ["sjf(oracle(noise=1, seed=2))", "my_file:p(x=1)"],
        ),
    ],
)
def test_specs_are_split_at_the_commas_outside(text: str, specs: list[str]) -> None:
    assert split_specs(text) == specs


@pytest.mark.parametrize("text", ["", "fcfs,", ",fcfs", "fcfs,,hrrn", " , "])
def test_an_empty_spec_in_a_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="before and after each"):
        split_specs(text)


@pytest.mark.parametrize("text", ["mlfq(quanta=(1,2)", "a'", "a)b"])
def test_an_open_bracket_in_a_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must close each bracket and quote"):
        split_specs(text)


ONE = EngineConfig(num_blocks=1, max_model_len=16)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: chain(fcfs(), fcfs), r"policies\[1\]=.* must be a Policy; call"),
        (lambda: chain(3), r"policies\[0\]=3 must be a Policy; as fcfs"),
        (lambda: bounded_wait("fcfs", 3), "policy='fcfs' must be a Policy"),
        (lambda: get_policy("chain(3)"), r"policies\[0\]=3 must be a Policy"),
        (lambda: sjf(history), "predictor=.* must be a LengthPredictor; call"),
        (lambda: get_policy("sjf(fcfs)"), "predictor=.* must be a LengthPredictor"),
        (lambda: get_policy("hrrn(3)"), "predictor=3 must be a LengthPredictor"),
        (lambda: fair_share(5), "weights=5 must map users to numbers"),
        (lambda: fair_share({1: 2.0}), r"weights\[1\]=2.0 must be of a user's name"),
        (lambda: fair_share({"a": True}), r"weights\['a'\]=True must be"),
        (lambda: fair_share({"a": 1e-300}), r"weights\['a'\]=1e-300 .* in \[1e-6"),
        (lambda: fair_share(input_weight=1e300), "input_weight=1e.300 must be"),
        (lambda: mlfq(quanta=(True,)), r"quanta=\(True,\) must hold integers"),
        (lambda: mlfq(skip_join=3), "skip_join=3 must be True or False"),
        (lambda: srpt(history(), max_preemptions=True), "max_preemptions=True must"),
        (lambda: priority(aging_s=1e-320), "aging_s=1e-320 must be .* >= 1e-6"),
        (lambda: simulate((), ONE, "fcfs", LinearCost()), "policy='fcfs' must be"),
        (
            lambda: check_policy(lambda lengths: 3),
            "policy.lengths.=3 must be",
        ),
        (lambda: check_policy("fcfs"), "policy='fcfs' must be a Policy; get_policy"),
        (lambda: check_policy(mlfq), "policy=.* must be a Policy: call the function"),
        (lambda: check_policy(chain), "policy=.* must be a Policy: call the function"),
        (
            lambda: LLM("/nope", dtype="float32", scheduling_policy=fcfs),
            "scheduling_policy=.* must be a Policy",
        ),
    ],
)
def test_what_is_no_policy_is_refused_at_once(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
