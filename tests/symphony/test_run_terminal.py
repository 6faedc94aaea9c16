"""`symphony run` on a terminal: the program has one, of the same size; keys are its own, and two of them leave it."""

import fcntl
import os
import pty
import select
import signal
import struct
import termios
from pathlib import Path

import pytest

from tests.symphony.launchers import SYMPHONY, eventually, has_gone

pytestmark = pytest.mark.slow


class Terminal:
    """A command on a pseudo-terminal of its own, as a shell would start it."""

    def __init__(self, launchers, *words: str, size=(30, 100), command=SYMPHONY) -> None:
        self.pid, self.master = pty.fork()
        if self.pid == 0:
            os.chdir(launchers.directory)
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the suite may run under nohup
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("4H", *size, 0, 0))
            os.execvpe(command[0], [*command, *map(str, words)], launchers.environment)
        self.shown = ""

    def shows(self, text: str) -> str:
        """Wait for a text; return the output until its end."""
        while text not in self.shown:
            assert select.select([self.master], [], [], 20)[0], self.shown
            try:
                self.shown += os.read(self.master, 4096).decode()
            except OSError:
                raise AssertionError(self.shown) from None
        before, _, self.shown = self.shown.partition(text)
        return before + text

    def types(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))

    def status(self) -> int:
        """Return the command's exit status, and close its terminal."""
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        os.close(self.master)
        return status


def test_a_program_has_a_terminal_of_the_same_size_that_follows_its_users(launchers):
    program = launchers.script("""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGWINCH})
        for _ in range(3):
            print(os.isatty(0), os.isatty(1), os.isatty(2), *os.get_terminal_size(), flush=True)
            if _ < 2:
                signal.sigwait({signal.SIGWINCH})
        print("name:", input("who? "))
        sys.exit(6)
    """)
    terminal = Terminal(launchers, "run", program)
    terminal.shows("True True True 100 30\r\n")
    terminal.resize(40, 120)
    terminal.shows("True True True 120 40\r\n")
    attached = Terminal(launchers, "attach", "prog", size=(20, 60))
    attached.shows("True True True 60 20\r\n")
    attached.types(b"\x10\x11")
    assert attached.status() == 0
    terminal.types(b"Ada\r")
    terminal.shows("name: Ada\r\n")
    assert terminal.status() == 6


def test_a_list_of_programs_is_no_wider_than_the_terminal(launchers):
    launchers.symphony("run", launchers.script("pass", "wide.py"), "word " * 200)
    listed = Terminal(launchers, "ps", "--all", size=(30, 90))
    (line,) = (each for each in listed.shows("is missing").splitlines() if " wide " in each)
    assert len(line) == 90
    assert listed.status() == 1, "there is no daemon"


def test_ctrl_c_is_a_key_of_the_program(launchers):
    terminal = Terminal(launchers, "run", launchers.script("print('ready')\ntime.sleep(60)"))
    terminal.shows("ready")
    terminal.types(b"\x03")
    terminal.shows("KeyboardInterrupt\r\n")
    assert terminal.status() == 130


def test_ctrl_p_ctrl_q_leaves_a_program_that_goes_on_and_is_attached_again(launchers):
    program = launchers.script("""
        print("ready")
        while (line := input()) != "end": print("<" + line + ">")
        sys.exit(3)
    """)
    terminal = Terminal(launchers, "run", program)
    terminal.shows("ready")
    terminal.types(b"a\x10b\r")
    terminal.shows("<a\x10b>")
    terminal.types(b"\x10\x11")
    assert terminal.status() == 0
    assert launchers.ps()[0]["name"] == "prog"
    again = Terminal(launchers, "attach", "prog")
    again.shows("Ctrl-P Ctrl-Q leaves it")
    again.types(b"more\r")
    again.shows("<more>")
    again.types(b"end\r")
    assert again.status() == 3


def test_a_terminal_that_is_closed_hangs_the_program_up(launchers):
    program = launchers.script("print(os.getpid(), 'ready')\ntime.sleep(60)")
    terminal = Terminal(launchers, "run", "--isolation", "none", program)
    pid = int(terminal.shows("ready").split()[0])
    os.close(terminal.master)
    os.waitpid(terminal.pid, 0)
    assert has_gone(pid)
    assert launchers.symphony("wait", "prog", check=False).stdout == "129\n"


def test_the_users_terminal_is_as_it_was_afterwards(launchers):
    master, slave = pty.openpty()
    before = termios.tcgetattr(slave)
    run = launchers.client("run", launchers.script("print('ready')\ninput()"), stdin=slave, stdout=slave, stderr=slave)
    assert eventually(lambda: termios.tcgetattr(slave) != before)
    os.write(master, b"\r")
    assert run.wait(20) == 0
    assert termios.tcgetattr(slave) == before
    os.close(master)
    os.close(slave)


def test_ctrl_z_stops_client_and_program_together(launchers):
    """The streams are pipes: the key reaches the client as a signal."""
    program = launchers.script("print(os.getpid())\nwhile True: time.sleep(0.01)")
    run = launchers.client("run", "--isolation", "none", program)
    pid = int(run.stdout.readline())
    run.send_signal(signal.SIGTSTP)
    eventually(lambda: state(run.pid) == state(pid) == "T")
    run.send_signal(signal.SIGCONT)
    eventually(lambda: state(pid) in "SR")
    run.send_signal(signal.SIGTERM)
    assert run.wait(20) == 143


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
