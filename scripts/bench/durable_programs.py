"""Programs that run beside the ones that measure, and a daemon that says where its start takes time."""

SMALL_FILES = """
import os, sys, threading, time
from pathlib import Path
way, num_threads, begins_s, seconds, where = sys.argv[1], *map(float, sys.argv[2:5]), sys.argv[5]
import libsym as sym
base = sym.kv_open("one.kv") if way != "plain" else None
num_made = [0] * int(num_threads)
def work(thread):
    while time.time() < begins_s:
        time.sleep(0.001)
    while time.time() < begins_s + seconds:
        name = f"{way.replace(' ', '')}-{os.getpid()}-{thread}-{num_made[thread]}"
        if way == "plain":
            descriptor = os.open(Path(where) / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            os.write(descriptor, bytes(4096))
            os.fsync(descriptor)
            os.close(descriptor)
        else:
            kv = sym.kv_fork(base, name) if "fork" in way else sym.kv_create(name)
            if "fork" not in way:
                sym.kv_write(kv, [1])
            if "sync" in way:
                sym.kv_sync(kv)
            kv.close()
        num_made[thread] += 1
threads = [threading.Thread(target=work, args=(number,)) for number in range(int(num_threads))]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(sum(num_made))
"""

DECODERS = """
import sys, threading
import libsym as sym
def work():
    while True:
        with sym.kv_create() as kv:
            for token in sym.generate(kv, [1, 2, 3], stop_at_end=False, max_tokens=300):
                pass
for _ in range(int(sys.argv[1])):
    threading.Thread(target=work).start()
"""

WRITER = """
import sys, time
from contextlib import suppress
import libsym as sym
does_sync, num_tokens, period_s = sys.argv[1] == "sync", int(sys.argv[2]), float(sys.argv[3])
source = sym.kv_open("source.kv")
with suppress(sym.NotFound):
    sym.kv_remove("written.kv")  # the writer before was killed
began_s = time.monotonic()
turn = 0
while True:
    kv = sym.kv_extract(source, [(1, num_tokens + 1)], "written.kv", rebase=False)
    if does_sync:
        sym.kv_sync(kv)
    sym.kv_remove(kv)
    turn += 1
    time.sleep(max(0.0, began_s + turn * period_s - time.monotonic()))
"""

START_PARTS = """
import sys, time
began_s = time.perf_counter()
import trio
from symphony import daemon
from symphony.config import Config
from symphony.cli import main
took_s = {"imports": time.perf_counter() - began_s}
def timed(name, owner, attribute):
    function = getattr(owner, attribute)
    def call(*arguments, **options):
        began_s = time.perf_counter()
        result = function(*arguments, **options)
        took_s[name] = took_s.get(name, 0.0) + time.perf_counter() - began_s
        return result
    setattr(owner, attribute, call)
from kvfs.durable import keeper, state
timed("load_model", daemon, "load_model")
timed("build_backend", daemon, "build_backend")
timed("State.load", state.State, "load")
timed("Restorer.run", keeper.Restorer, "run")
timed("Keeper._take_over", keeper.Keeper, "_take_over")
timed("leftovers", keeper, "remove_leftovers")
timed("Keeper", daemon, "Keeper")
timed("build", daemon, "build")
def ready(*words, **_):
    import json
    took_s["ready"] = time.perf_counter() - began_s
    sys.__stdout__.write(json.dumps(took_s) + "\\n")
    sys.__stdout__.flush()
daemon.print = ready
sys.exit(main(sys.argv[1:]))
"""
