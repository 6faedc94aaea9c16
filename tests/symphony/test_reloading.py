"""What a reload does where something is wrong with what it names."""

from dataclasses import replace

from libsym.errors import Invalid
from symphony.config import Config
from symphony.reloading import CHANGEABLE, Reloading, Source
from symphony.service.notify import Notifier


def reloading(config: Config, *, is_stale=lambda: False, **apply) -> Reloading:
    every = {key: apply.get(key, lambda _config: None) for key in CHANGEABLE}
    return Reloading(config, Source(None, {}), every, Notifier(), {"policy": is_stale})


def test_a_policy_that_is_refused_ends_nothing_and_what_was_changed_with_it_is_put_back():
    """The policy before is a file that is broken by now: it goes on as it was loaded."""
    quotas = []

    def use(config):
        raise Invalid(f"policy {config.policy} is no policy")

    config = Config()
    of_daemon = reloading(
        replace(config, policy="before.py"), policy=use, quota=lambda config: quotas.append(config.quota)
    )
    of_daemon._take(replace(config, policy="after.py", quota=7))
    assert of_daemon.outcome.error == "policy after.py is no policy"
    assert of_daemon.config == replace(config, policy="before.py")
    assert quotas == [7, None]


def test_a_policy_s_file_is_read_again_where_it_has_changed_although_its_name_is_the_same():
    used, stale = [], [True]
    config = replace(Config(), policy="mine.py")
    of_daemon = reloading(config, policy=lambda config: used.append(config.policy), is_stale=lambda: stale[0])
    of_daemon._take(replace(config))
    assert used == ["mine.py"]
    assert of_daemon.outcome.changed == ("policy",)
    stale[0] = False
    of_daemon._take(replace(config))
    assert used == ["mine.py"]
    of_daemon._take(replace(config, policy="lru"))
    of_daemon._take(replace(config, policy="lru"))
    assert used == ["mine.py", "lru"]
