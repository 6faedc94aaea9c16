"""The metrics of a daemon: the same on the mount and on the port, as Prometheus reads them, and nothing private."""

import os
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from tests.symphony.launchers import eventually

SECRET = "of-ann-alone"


def families(text):
    """Return the families of metrics by name, each with its samples by their labels."""
    return {
        family.name: {(sample.name, *sorted(sample.labels.items())): sample.value for sample in family.samples}
        for family in text_string_to_metric_families(text)
    }


def test_the_port_tells_what_the_file_does_and_prometheus_understands_it(start_daemon):
    daemon = start_daemon("--model", "tiny", "--kv-memory", "16M", "--metrics-port", "0")
    daemon.run(
        f"""
        sym.kv_mkdir("{SECRET}-directory")
        with sym.kv_create("{SECRET}-directory/{SECRET}.kv") as kv:
            sym.pred(kv, sym.tokenize("{SECRET}"))
            tokens = list(sym.generate(kv, [1], max_tokens=10))
        """
    )
    url = f"http://localhost:{daemon.stat()['metrics_port']}/metrics"

    def told():
        """Counted is what was used when the daemon looked: until both are of one moment."""
        with urllib.request.urlopen(url, timeout=30) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            text = answer.read().decode()
        file = (daemon.mount / ".symphony" / "metrics").read_text()
        by_port, by_file = families(text), families(file)
        assert by_port.keys() == by_file.keys()
        assert {name: found.keys() for name, found in by_port.items()} == {
            name: found.keys() for name, found in by_file.items()
        }
        steady = [name for name in by_port if name.startswith(("symphony_step", "symphony_stretch", "symphony_tokens"))]
        return all(by_port[name] == by_file[name] for name in steady) and (text, by_port)

    text, found = eventually(told)
    assert SECRET not in text
    for name in (
        "symphony_step_duration_seconds",
        "symphony_stretch_duration_seconds",
        "symphony_stretch_wait_seconds",
    ):
        buckets = [value for (sample, *_), value in found[name].items() if sample.endswith("_bucket")]
        assert buckets == sorted(buckets), "they add up"
        assert buckets[-1] == found[name][(f"{name}_count",)] > 0
    assert found["symphony_steps"][("symphony_steps_total",)] >= 10
    used = found["symphony_user_tokens"][("symphony_user_tokens_total", ("user", str(os.getuid())))]
    assert used >= len(SECRET) + 10
    labels = {key for samples in found.values() for _, *pairs in samples for key, _ in pairs}
    assert labels - {"user"} == {"name", "le", "op", "result", "phase", "way", "hidden"}, "people are told of by a uid"
    names = {value for samples in found.values() for _, *pairs in samples for key, value in pairs if key == "name"}
    assert names == {"tiny"}, "the model's"
