"""What a reload does where something is wrong with what it names."""

from dataclasses import replace

from libsym.errors import Invalid
from symphony.config import Config
from symphony.reloading import CHANGEABLE, Reloading, Source
from symphony.service.notify import Notifier


def reloading(config: Config, **apply) -> Reloading:
    every = {key: apply.get(key, lambda _config: None) for key in CHANGEABLE}
    return Reloading(config, Source(None, {}), every, Notifier())


def test_what_can_not_be_taken_back_ends_nothing_and_is_told():
    """The policy before is a file that is broken by now."""

    def use(config):
        raise Invalid(f"policy {config.policy} is no policy")

    config = Config()
    of_daemon = reloading(replace(config, policy="before.py"), policy=use)
    of_daemon._take(replace(config, policy="after.py", quota=7))
    assert of_daemon.outcome.error == "policy after.py is no policy; and policy before.py is no policy"
    assert of_daemon.config == replace(config, policy="before.py")


def test_a_policy_s_file_is_read_again_although_its_name_is_the_same():
    used = []
    config = replace(Config(), policy="mine.py")
    of_daemon = reloading(config, policy=lambda config: used.append(config.policy))
    of_daemon._take(replace(config))
    assert used == ["mine.py"]
    assert of_daemon.outcome.changed == ("policy",)
    of_daemon._take(replace(config, policy="lru"))
    of_daemon._take(replace(config, policy="lru"))
    assert used == ["mine.py", "lru"]
