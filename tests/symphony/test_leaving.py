"""A program that has run to its end leaves nothing undone: it ends as where python itself runs it."""

import importlib.util
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

ENDS = {
    "a file without close": "kept = open('left.txt', 'w'); kept.write('it is all that was written')",
    "a file in a function's cycle": """
        def f(): pass
        f.me, f.file = f, open('left.txt', 'w')
        f.file.write('it is all that was written')
    """,
    "a compressed file without close": """
        import gzip
        kept = gzip.open('left.txt', 'wb')
        kept.write(b'it is all that was written')
    """,
    "a temporary file": "import tempfile; kept = tempfile.NamedTemporaryFile(dir='.'); print(len(os.listdir('.')))",
    "an object with __del__": """
        class Last:
            def __init__(self, word): self.word = word
            def __del__(self): print(self.word, os.getcwd() != '', flush=True)
        _first, second = Last('first'), Last('second')
        cycle = Last('cycle'); cycle.me = cycle
    """,
    "weakref.finalize and atexit": """
        import atexit, weakref
        class Kept: pass
        kept = Kept()
        weakref.finalize(kept, print, 'finalized')
        atexit.register(print, 'registered first')
        atexit.register(print, 'registered last')
    """,
    "atexit that fails": "import atexit; atexit.register(lambda: 1 / 0); print('ran')",
    "threads that are joined": """
        import threading
        threading.Thread(target=lambda: (time.sleep(0.2), print('joined'))).start()
    """,
    "threads that are not": """
        import threading
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        kept = open('left.txt', 'w'); kept.write('it is all that was written')
    """,
    "what C has not written yet": """
        import ctypes
        ctypes.CDLL(None).printf(b'from C')
    """,
    "output that can't be written": "sys.stdout = open('/dev/full', 'w'); print('x')",
    "output that is closed": "sys.stdout.close()",
    "another output": "sys.stdout = open('left.txt', 'w'); print('it is all that was written')",
    "an error": "kept = open('left.txt', 'w'); kept.write('it is all that was written'); 1 / 0",
    "a module that is none": "sys.modules['odd'] = None; sys.modules['odder'] = 7",
    "an object that claims to be a module": """
        class Odd:
            __slots__ = ()
            __class__ = type(sys)
        sys.modules['odd'] = Odd()
    """,
    "a module whose contents have no names": """
        import types
        os.kept = sys.modules['odd'] = types.ModuleType('odd')
        vars(os.kept)[7] = 'seven'
    """,
    "a module that looks at who asks": """
        import types
        class Lazy(types.ModuleType):
            def __getattribute__(self, name): raise RuntimeError(name)
        os.kept = sys.modules['odd'] = Lazy('odd')
    """,
    "a status": "kept = open('left.txt', 'w'); kept.write('it is all that was written'); sys.exit(7)",
}


EXTENSIONS = [
    *("aiohttp", "charset_normalizer", "cryptography.hazmat.bindings._rust", "frozenlist", "jiter", "llguidance"),
    *("lxml.etree", "markupsafe", "mcp", "msgpack", "multidict", "numpy", "orjson", "pandas", "PIL.Image", "propcache"),
    *("psutil", "pydantic_core", "regex", "rpds", "safetensors", "scipy", "sqlite3", "tiktoken", "tokenizers", "torch"),
    *("xxhash", "yaml", "yarl", "zmq", "zstandard"),
]


def test_programs_that_import_extensions_succeed(launchers):
    """A program imports all that is here of the extensions that people use most: each has modules of its own kind."""
    found = [name for name in EXTENSIONS if importlib.util.find_spec(name.partition(".")[0])]
    assert len(found) >= 20, found
    prog = launchers.script("\n".join([*(f"import {name}" for name in found), "print('done')"]))
    command = [sys.executable, "-m", "symphony", "run", "--bind", ".", prog]
    words = {"env": launchers.environment, "cwd": launchers.directory, "capture_output": True, "text": True}
    done = subprocess.run(command, check=False, timeout=60, **words)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


@pytest.mark.parametrize("source", ENDS.values(), ids=ENDS.keys())
def test_a_program_ends_as_where_python_runs_it(launchers, source):
    prog, left = launchers.script(source), launchers.directory / "left.txt"
    seen = []
    for command in ([sys.executable, "-u"], [sys.executable, "-m", "symphony", "run", "--bind", "."]):
        words = {"env": launchers.environment, "cwd": launchers.directory, "capture_output": True, "timeout": 30}
        done = subprocess.run([*command, prog], check=False, **words)
        kept = left.read_bytes()[10:] if left.exists() else None  # where gzip has no time any more
        left.unlink(missing_ok=True)
        said = done.stderr.splitlines()[-1:]
        seen.append((done.returncode, done.stdout, said, kept, len(list(launchers.directory.iterdir()))))
    assert seen[0] == seen[1]
