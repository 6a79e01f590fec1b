"""Profile: prices of instructions, and files and numbers that are refused."""

import numpy as np
import pytest

from recycle import JobError, Link, Profile, Shape


def test_a_transfer_takes_latency_and_bytes_over_bandwidth():
    shape = Shape(1, 3, 1)
    assert Profile(latency=0.5, bandwidth=100.0, message=20.0).transfer_seconds(shape, 0, 1, 0) == 0.7
    assert Profile(latency=0.5, message=20.0).transfer_seconds(shape, 0, 1, 0) == 0.5
    uneven = Profile(bandwidth=2.0, message=[2.0, 6.0, 0.0])
    assert uneven.transfer_seconds(shape, [0, 1, 2, 1], [1, 2, 1, 0], [0, 1, 1, 0]).tolist() == [1, 3, 3, 1]
    with pytest.raises(JobError, match="message lists 3 stages, the job has 2"):
        uneven.transfer_seconds(Shape(1, 2, 1), 0, 1, 0)


def test_most_specific_link_counts():
    precedence = ["0.1>1.2", "0.1>1.*", "*.1>1.2", "0.*>1.*", "*.1>*.2", "*.1>*.*", "*.*>*.2", "*.*>*.*"]
    shape, sender, receiver = Shape(2, 3, 1), 1, 5
    for first in range(len(precedence)):
        links = {pair: Link(1.0 + n) for n, pair in enumerate(precedence) if n >= first}
        for order in (dict(links), dict(reversed(links.items()))):
            profile = Profile(latency=0.5, links={**order, "1.2>0.1": Link(99.0), "0.1>0.2": Link(98.0)})
            assert profile.transfer_seconds(shape, sender, receiver, 1) == 1.0 + first
    assert Profile(latency=0.5, links={"1.2>0.1": Link(99.0)}).transfer_seconds(shape, sender, receiver, 1) == 0.5


@pytest.mark.parametrize(
    "pair", ["", "0.1", "0.1>", "0.1>0.2>0.3", "0.1>x.2", "0.1>0", "1>2", "0.1 > 0.2", "00.1>0.2", "-1.0>0.0"]
)
def test_invalid_pair_of_a_link_is_refused(pair):
    with pytest.raises(JobError, match="is not a pair of workers: write sender>receiver"):
        Profile(links={pair: Link()})


def test_a_saved_profile_loads_equal_and_keeps_its_digest(tmp_path):
    profile = Profile(
        forward=[1.0, 2.0],
        bandwidth=1e9,
        links={"0.1>0.2": Link(1e-5, 2e9), "0.*>1.*": Link(1e-3)},
        message=[4096.0, 0.0],
        speed={"0.1": 1.5},
        overlapped_pair=3.0,
    )
    profile.save(tmp_path / "profile.json")
    loaded = Profile.load(tmp_path / "profile.json")
    assert loaded == profile
    assert loaded.digest() == profile.digest() != Profile().digest()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "truncated"), ("{", "truncated"), ("[1]", "JSON object"), ('{"forward": "fast"}', "forward"),
        ('{"foward": 1}', "'foward' is not a field of a profile"), ('{"forward": -1}', "forward must be finite"),
        ('{"links": {"0.1": {}}}', "is not a pair of workers"), ('{"links": {"0.1>0.2": {"latancy": 1}}}', "latancy"),
        ('{"links": {"0.1>0.2": {"latency": null}}}', r"Expected `float`.*links"),
    ],
)  # fmt: skip
def test_invalid_profile_file_is_refused(tmp_path, content, complaint):
    file = tmp_path / "p.json"
    file.write_text(content)
    with pytest.raises(JobError, match=complaint) as error:
        Profile.load(file)
    assert str(error.value).startswith(f"{file}: ")
    with pytest.raises(JobError, match="cannot be read"):
        Profile.load(tmp_path)


def test_peers_are_alike_without_speeds_and_links_of_pipelines():
    assert Profile(links={"*.0>*.1": Link(1.0)}, latency=2.0).are_peers_alike
    assert not Profile(links={"*.0>0.1": Link(1.0)}).are_peers_alike
    assert not Profile(links={"0.0>*.1": Link(1.0)}).are_peers_alike
    assert not Profile(speed={"0.0": 2.0}).are_peers_alike


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"forward": "a"}, "forward must be finite and at least 0, got 'a'"),
        ({"backward_weight": [1.0, float("nan")]}, "backward_weight must be finite"),
        ({"weight_stash": 1.5}, "weight_stash must lie between 0 and 1"),
        ({"bandwidth": 0.0}, "bandwidth must be finite and above 0"),
        ({"speed": {"0.0": 0.0}}, "speed of 0.0 must be finite and above 0"),
        ({"links": {"0.1>*.2": Link(-1.0)}}, r"latency of link 0\.1>\*\.2 must be finite"),
        ({"links": {"0.1>*.2": Link(0.0, float("inf"))}}, r"bandwidth of link 0\.1>\*\.2 must be finite"),
        ({"links": {"0.1>0.1": Link()}}, r"links: '0\.1>0\.1' is one worker"),
        ({"forward": np.array([1.0, 2.0])}, "forward must be finite and at least 0, got array"),
        ({"speed": 3}, "speed must be a dict, got 3"),
        ({"links": {"0.0>0.1": 3}}, "link 0.0>0.1 must be a Link, got 3"),
    ],
)
def test_impossible_quantity_is_refused(given, message):
    with pytest.raises(JobError, match=f"^profile: {message}"):
        Profile(**given)
