"""Profile: what instructions cost, and which files and numbers are refused."""

from pathlib import Path

import pytest

from recycle import JobError, Profile, Worker


def test_a_number_stands_for_all_stages_and_a_list_for_each() -> None:
    profile = Profile(forward=2, backward_input=[1, 2, 3])
    assert profile.per_stage("forward", 3) == [2.0, 2.0, 2.0]
    assert profile.per_stage("backward_input", 3) == [1.0, 2.0, 3.0]
    with pytest.raises(JobError, match="backward_input lists 3 stages, the job has 4"):
        profile.per_stage("backward_input", 4)


def test_a_transfer_takes_latency_and_bytes_over_bandwidth() -> None:
    assert Profile(latency=0.5, bandwidth=100.0, message=20.0).transfer() == 0.7
    assert Profile(latency=0.5, message=20.0).transfer() == 0.5


def test_speed_is_one_unless_said() -> None:
    profile = Profile(speed={"1.2": 3.0})
    assert (profile.speed_of(Worker(1, 2)), profile.speed_of(Worker(0, 0))) == (3.0, 1.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"forward": -1.0}, {"backward_weight": [1.0, float("nan")]}, {"latency": float("inf")}, {"weight_stash": 1.5},
        {"bandwidth": 0.0}, {"speed": {"0.0": 0.0}}, {"overlapped_pair": -2.0}, {"static": [-1.0]},
    ],
)  # fmt: skip
def test_impossible_quantities_are_refused_by_name(wrong: dict[str, object]) -> None:
    with pytest.raises(JobError, match=f"profile: .*{next(iter(wrong))}"):
        Profile(**wrong)  # type: ignore[arg-type]


def test_a_saved_profile_loads_equal_and_keeps_its_digest(tmp_path: Path) -> None:
    profile = Profile(forward=[1.0, 2.0], bandwidth=1e9, message=4096.0, speed={"0.1": 1.5}, overlapped_pair=3.0)
    profile.save(tmp_path / "profile.json")
    loaded = Profile.load(tmp_path / "profile.json")
    assert loaded == profile
    assert loaded.digest() == profile.digest() != Profile().digest()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "truncated"), ("{", "truncated"), ("[1]", "Expected `object`"), ('{"forward": "fast"}', "forward"),
        ('{"foward": 1}', "'foward' is not a field of a profile"), ('{"forward": -1}', "forward must be finite"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_profile_is_refused_with_its_name(tmp_path: Path, content: str, complaint: str) -> None:
    file = tmp_path / "p.json"
    file.write_text(content)
    with pytest.raises(JobError, match=complaint) as error:
        Profile.load(file)
    assert str(error.value).startswith(f"{file}: ")
    with pytest.raises(JobError, match="cannot be read"):
        Profile.load(tmp_path)
