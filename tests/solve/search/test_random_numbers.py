from recycle.solve.problem_arrays import draw, seeded


def test_a_seed_gives_the_same_numbers_for_ever():
    state = seeded(3)
    assert [int(draw(state)) for _ in range(4)] == [119106029, 1583775778, 687545011, 243210352]
    assert seeded(3 + 2147483647) == seeded(3)
