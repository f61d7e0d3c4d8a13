"""The text timeline: exact where lengths are whole, honest where they are cut, readable without colour."""

from plait.schedule import Action, Costs, Kind, Schedule, Span, Timeline, draw, generate, lower, simulate


def test_1f1b_is_drawn_with_whole_columns_and_both_names_of_the_bubble() -> None:
    text = draw(simulate(lower(generate("1f1b", 2, 3)), Costs.equal(2)), width=60, unit="units")
    assert text.splitlines() == [
        "rank 0 |F0-F1-......BW0===F2-BW1===...BW2===| 25.0% idle",
        "rank 1 |...F0-BW0===F1-BW1===F2-BW2===......| 25.0% idle",
        "F forward; BW backward; number: micro-batch; . idle",
        "step 12 units; bubble 25.00% as a share of the step, 33.33% relative to the ideal time",
    ]


def test_the_drawing_fits_its_width() -> None:
    for width in (60, 100, 200):
        text = draw(simulate(lower(generate("1f1b", 8, 16)), Costs.equal(8, f=1.0, b=1.1, w=0.93)), width)
        assert max(len(line) for line in text.splitlines()[:8]) <= width
        assert text.isascii()


def test_a_micro_batch_number_is_never_cut() -> None:
    timeline = Timeline.of([[Span(Action(Kind.F, 0, 123), 0.0, 3.0), Span(Action(Kind.F, 0, 4), 3.0, 9.0)]])
    assert "|F--F4----|" in draw(timeline, width=29)


def test_a_rank_of_several_stages_names_them() -> None:
    program = tuple(Action(kind, stage) for kind, stage in ((Kind.F, 0), (Kind.F, 1), (Kind.BW, 1), (Kind.BW, 0)))
    text = draw(simulate(lower(Schedule("one rank", 1, (0, 0), (program,))), Costs.equal(2)), width=60)
    assert "|F0/0--F0/1--BW0/1=======BW0/0=======|" in text


def test_a_timeline_without_actions_is_drawn_empty() -> None:
    assert draw(Timeline.of([[], []])).startswith("rank 0 ||  0.0% idle")
