"""The configuration file: the places of errors, the possible keys, and the agreement of its two descriptions."""

import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.tiers import loading
from libsym.errors import Invalid
from symphony.manuals.manual_text import plain_text
from symphony.settings.config import NO_POLICY, POLICIES, SETTINGS
from symphony.settings.config_file import lines_of, read_config_file
from symphony.settings.described import list_of_keys, shipped_file
from symphony.settings.loading import load, problems_of
from tests.symphony.launchers import ROOT

AWKWARD = '''\
# model = "nobody"
"model" = "tiny"   # = quota
  socket="/a#b"

quota = """
threads = 1
4G
"""
programs =\t7
state = \'\'\'/x
[weight]
mount = 3\'\'\'
[ weight ]
# root = 9
root = 2
"1" = [
   1,
   # root = 3

   2 ]
a.b = { c = 1 }
'''


def test_packed_weights_go_to_the_users_cache_unless_somebody_says_otherwise(tmp_path, monkeypatch):
    monkeypatch.delenv("SYMPHONY_WEIGHTS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load(None, {}).weights_cache == tmp_path / "symphony"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert load(None, {}).weights_cache == Path.home() / ".cache/symphony"
    monkeypatch.setenv("SYMPHONY_WEIGHTS_CACHE", "/var/cache/symphony")
    assert load(None, {}).weights_cache == Path("/var/cache/symphony")
    assert load(None, {"weights_cache": ""}).weights_cache is None
    (tmp_path / "symphony.toml").write_text('weights_cache = ""\n')
    assert load(tmp_path / "symphony.toml", {}).weights_cache is None
    monkeypatch.setenv("SYMPHONY_WEIGHTS_CACHE", "")
    assert load(None, {}).weights_cache is None
    assert load(None, {"weights_cache": str(tmp_path)}).weights_cache == tmp_path


def test_the_policies_are_those_that_there_are():
    assert set(POLICIES) == {*loading.NAMES, NO_POLICY}


def test_each_key_has_the_line_that_it_begins_in():
    assert lines_of(AWKWARD) == {
        ("model",): 2,
        ("socket",): 3,
        ("quota",): 5,
        ("programs",): 9,
        ("state",): 10,
        ("weight",): 13,
        ("weight", "root"): 15,
        ("weight", "1"): 16,
        ("weight", "a"): 21,
        ("weight", "a", "b"): 21,
        ("weight", "a", "b", "c"): 21,
    }


@given(st.lists(st.sampled_from(AWKWARD.splitlines()), max_size=12))
def test_a_line_that_is_named_has_the_key_in_it(lines):
    text = "\n".join(lines)
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return
    for key, line in lines_of(text).items():
        assert key[-1] in lines[line - 1], text


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ('model = "tiny"\nthreds = 2\n', 2, "unknown key 'threds': threads?"),
        ("kv-memory = 1\n", 1, "unknown key 'kv-memory': kv_memory?"),
        ("zzz = 1\n", 1, "unknown key 'zzz' (known: allow_other, "),
        ("\n\nmodel = 7\n", 3, "model is 7: a string needed"),
        ("threads = true\n", 1, "threads is True: a whole number needed"),
        ("threads = 0\n", 1, "threads is 0: at least 1"),
        ("same_bits = 1\n", 1, "same_bits is 1: true or false needed"),
        ('quota = """\n4X\n"""\n', 1, "quota: '4X\\n' is no size"),
        ('disk_timeout = "soon"\n', 1, "disk_timeout is 'soon'"),
        ("drain = -1\n", 1, "drain is -1"),
        ("watchdog = 0\n", 1, "watchdog is 0"),
        ("step_ms = 1e9\n", 1, "step_ms is 1000000000.0"),
        ("mount = 7\n", 1, "mount is 7: a path needed"),
        ("weights_cache = 7\n", 1, "weights_cache is 7: a path needed"),
        ('socket = "~nobody-at-all/s"\n', 1, "socket is '~nobody-at-all/s'"),
        ('model = "tiny"\n[weight]\nroot = 1\nnobody-at-all = 2\n', 4, "there is no such user"),
        ("weight = 3\n", 1, "weight is 3: a table"),
        ('drain = 1\nweight = ["root=2"]\n', 2, "weight is ['root=2']: a table of users and numbers needed"),
        ("[weight]\nroot = 900\n", 2, "weight of root: "),
        ('device = "cpu"\nprecision = "fp9"\n', 2, "precision 'fp9' is not one of"),
        ('log = "paper"\n', 1, "log 'paper' is not one of auto, text, json, journal"),
        ('mount_helper = "/run/h"\nallow_other = false\n', 2, "allow_other is false"),
        ('fleet_store = "10.0.0.3:1"\n', 1, "fleet_store is for a machine of a fleet: set etcd and peer_listen, too"),
        (
            'fleet_events = "tcp://*:5557"\n',
            1,
            "fleet_events is 'tcp://*:5557': write ipc:///PATH or tcp://IP-ADDRESS:PORT",
        ),
        ('fleet_events = "ipc://@events"\n', 1, "fleet_events is 'ipc://@events': write ipc:///PATH or tcp://"),
        ("metrics_port = 65536\n", 1, "metrics_port is 65536: 1 to 65535, or 0 for any that is free, is needed"),
        ("metrics_port = -1\n", 1, "metrics_port is -1"),
        ("a = 1\na = 2\n", 2, "no TOML: Cannot overwrite a value, in 'a = 2'"),
        ("drain = true\n", 1, "drain is True: a number of seconds needed"),
        ('policy = "fifo"\n', 1, "policy 'fifo' is not one of cost, lru, ttl, idle, none, nor a file"),
        ("grace_ms = -1\n", 1, "grace_ms is -1: 0 to 60000 is needed"),
        ("pin_share = 50\n", 1, "pin_share is 50: 0 to 1 is needed"),
        ("step_ms = false\n", 1, "step_ms is False: a number of milliseconds needed"),
        ('model = ""\n', 1, "model is '': a name or a path needed"),
        ('\nmount = "/a\\u0000b"\n', 2, "mount is '/a\\x00b': a path needed"),
        ("threads = 99999999999999999999\n", 1, "threads is 99999999999999999999: 2,147,483,647 is the most"),
        ('quota = "1e9T"\n', 1, "quota: '1e9T' is no size: no machine has so much"),
        ("[weight]\nroot = 2\n0 = 3\n", 3, "weight of 0: uid 0 has a weight already"),
        ('\nmodel = "\x80"\n', 2, "no text in UTF-8: byte 10 is 0x80"),
        ("[weight\n", 1, "no TOML: "),
        ("x = 'abc", 1, "no TOML: "),
        (f"open = true\nquota = 0x{'f' * 5000}\n", 2, "quota can't be read: "),
        (f"[weight]\n{'1' * 5000} = 1\n", 2, "weight"),
    ],
)
def test_an_error_names_file_line_and_key(tmp_path, text, line, says):
    path = tmp_path / "symphony.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(Invalid) as raised:
        load(path, {})
    assert str(raised.value).startswith(f"{path}:{line}: ")
    assert says in str(raised.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        # A word of the command line that is no UTF-8 has surrogates in it, which no log and no status file takes.
        *(({key: "/a\udcff"}, f"^{key} is '/a.udcff': a text") for key in ("model", "mount", "state", "policy")),
        ({"model": ("a=tiny", "b=tiny")}, "^model: a daemon serves one model, and 2 are given: a=tiny, b=tiny$"),
        ({"kv_memory": "lots"}, "'lots' is no size"),
        ({"kv_memory": "1e20"}, "no machine has so much"),
        ({"precision": "fp8"}, "'fp8' is not one of float32, bf16, int8, int4, auto"),
        ({"device": "tpu"}, "device 'tpu' is not one of cpu, cuda"),
        ({"device": "cuda", "precision": "int8"}, "'int8' is not one of float32, bf16, float16 on a GPU"),
        ({"device": "cuda", "kv_dtype": "float32"}, "'float32' is not one of bf16 .*fp8"),
        ({"gpu_memory": "4G"}, "gpu_memory is for --device cuda"),
        ({"kv_dtype": "fp8"}, "kv_dtype is for --device cuda"),
        ({"invariant": False}, "--no-invariant is for --device cuda"),
        ({"quota": "much"}, "is no size"),
        ({"quota": "0"}, "greater than 0"),
        ({"quota_files": 0}, "at least 1"),
        *(({"weight": [f"{uid}=2"]}, "no such user") for uid in ("nobody-of-this-name", -1, 1 << 32)),
        *(({"weight": weight}, "is no weight") for weight in (["0=much"], ["0="], {"root": True})),
        ({"weight": ["2"]}, "USER=N"),
        ({"weight": ["1=1", "0=101"]}, "0.01 to 100"),
        ({"weight": 2}, "table of users"),
    ],
    ids=str,
)
def test_options_that_can_not_be_or_contradict_each_other_are_named(words, message):
    with pytest.raises(Invalid, match=message):
        load(None, words)


def test_what_the_command_line_says_is_no_error_of_the_file(tmp_path):
    path = tmp_path / "symphony.toml"
    path.write_text("threads = 3\n")
    with pytest.raises(Invalid) as raised:
        load(path, {"threads": 0})
    assert str(raised.value) == "threads is 0: at least 1 is needed"
    assert load(path, {"threads": 2}).threads == 2
    path.write_text("threads = true\n")
    with pytest.raises(Invalid, match=rf"^{path}:1: threads is True"):
        load(path, {"threads": 2})


def test_what_python_s_parser_can_not_take_is_an_error_like_others(tmp_path):
    """Else a reload of such a file would end the daemon. A file without end is not read to it."""
    path = tmp_path / "symphony.toml"
    for text in ("x = " + "[" * 5000 + "]" * 5000, ".".join("a" * 2000) + " = 1", f"threads = {'1' * 5000}"):
        path.write_text(text)
        with pytest.raises(Invalid, match="no configuration"):
            load(path, {})
    with pytest.raises(Invalid, match="it is no configuration file"):
        load(Path("/dev/zero"), {})


def test_a_table_of_many_users_is_read_line_by_line():
    """Not all of it again for each of them: of so many that took an hour."""
    lines = lines_of("[weight]\n" + "".join(f"{uid} = 2\n" for uid in range(30_000)))
    assert lines["weight", "29999"] == 30_001


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("model = [\n" + "\n" * 100_000 + "]\nquota = 1\n", 1, "a string needed"),
        ("model = '''\n" + "a\n" * 100_000 + "'''\nquota = true\n", 100_003, "quota"),
        ("\n" + "a." * 100_000 + "a = 1\n", 2, "a key of more than 32 parts"),
        ("\nmodel = {" + "a." * 100_000 + "a = 1}\n", 2, "a key of more than 32 parts"),
        ("\n[" + "a." * 100_000 + "a]\n", 2, "a key of more than 32 parts"),
        ('model = "' + '\\\\"' * 100_000 + "\n", 1, "no TOML"),
    ],
)
def test_a_long_value_or_key_costs_no_square_of_its_length(tmp_path, text, line, says):
    """Such a file once held a reload for hours, or took all memory."""
    path = tmp_path / "symphony.toml"
    path.write_text(text)
    with pytest.raises(Invalid, match=rf"{path}:{line}: .*{says}"):
        load(path, {})


def test_check_names_every_error_and_show_says_where_values_are_from(tmp_path, symphony):
    path = tmp_path / "symphony.toml"
    path.write_text(
        'model = "tiny"\nprograms = -1\n\nthreds = 1\nquota = "4X"\nkv_dtype = "fp8"\ngpu_memory = "4G"\n'
        "[weight]\nnobody-at-all = 1\nroot = 1\nnobody-either = 1\n"
    )
    status, told, errors = symphony("config", "check", path)
    assert (status, told) == (1, "")
    assert [line.partition(" ")[0] for line in errors.splitlines()] == [
        f"{path}:{line}:" for line in (2, 4, 5, 6, 7, 9, 11)
    ]
    path.write_text('model = "tiny"\n[weight]\nroot = 2\n')
    assert symphony("config", "check", path) == (0, f"{path}: 2 keys, all right\n", "")
    shown = symphony("config", "show", path)[1].replace("= ", "")
    assert re.search(rf'^model +"tiny" +# {path}:1$', shown, re.MULTILINE)
    assert re.search(r"^quota +null +# default$", shown, re.MULTILINE)


def test_the_file_that_is_installed_says_nothing_by_itself_and_shows_a_value_of_every_key(tmp_path):
    path = tmp_path / "symphony.toml"
    path.write_text(shipped_file())
    assert read_config_file(path).values == {}
    path.write_text(re.sub(r"^#(?=[\[a-z])", "", shipped_file(), flags=re.MULTILINE))
    found = read_config_file(path)
    assert found.values.keys() == SETTINGS.keys()
    of_cuda_or_alice = {("gpu_memory",), ("kv_dtype",), ("weight", "alice")}
    assert {problem.key for problem in problems_of(found)} <= of_cuda_or_alice


def test_the_default_of_a_key_is_a_value_that_it_takes():
    for key, setting in SETTINGS.items():
        if setting.default is not None:
            assert setting.kind.parse(key, setting.default) == setting.default


def test_symphony_toml_5_has_the_list_of_the_table():
    page = (ROOT / "man/symphony.toml.5").read_text(encoding="utf-8")
    written = page.partition("\n.SH KEYS\n")[2].partition(".SH ")[0]
    assert written == list_of_keys(), "python -m symphony.settings.described man/symphony.toml.5 writes it"


def test_symphony_serve_1_names_the_defaults_of_the_table():
    page = (ROOT / "man/symphony-serve.1").read_text(encoding="utf-8")
    entries = [" ".join(entry.split()) for entry in plain_text(page).split("\n\n")]
    for key, setting in SETTINGS.items():
        if isinstance(setting.default, int | float) and not isinstance(setting.default, bool):
            option = f"--{key.replace('_', '-')} "
            (entry,) = [each for each in entries if each.startswith(option)]
            assert re.search(rf"Default: {setting.default:,g}[.;]", entry), key
