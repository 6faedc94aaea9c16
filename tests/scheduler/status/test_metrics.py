"""Prometheus's text format."""

from scheduler.status.metrics import counter, counters, exposition, gauge, histogram


def test_each_metric_has_help_type_and_samples():
    text = exposition((gauge("a", "An a.", 1.5), counter("b_total", "Bs.", 3)))
    assert text == (
        "# HELP a An a.\n# TYPE a gauge\na 1.500000\n# HELP b_total Bs.\n# TYPE b_total counter\nb_total 3\n"
    )


def test_labels_are_quoted():
    text = exposition((gauge("a", "An a.", 1, {"name": 'x"\\\ny'}), counters("b", "Bs.", "op", {"p": 1, "q": 2})))
    assert 'a{name="x\\"\\\\\\ny"} 1\n' in text
    assert 'b{op="p"} 1\nb{op="q"} 2\n' in text


def test_the_buckets_of_a_histogram_add_up():
    text = exposition((histogram("h", "Hs.", (1, 2), (3, 0, 4), 20),))
    assert text.splitlines()[2:] == [
        'h_bucket{le="1"} 3',
        'h_bucket{le="2"} 3',
        'h_bucket{le="+Inf"} 7',
        "h_sum 20",
        "h_count 7",
    ]
