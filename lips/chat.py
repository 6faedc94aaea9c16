"""Talks with you, and keeps the conversation in a KV file: leave, restart the daemon, and go on.

    symphony run chat
    symphony run chat --system "You are a pirate." pirate.kv

Lines are questions; `/undo` forgets the last question and its answer, `/fork NAME` keeps the conversation so far in
another file, `/quit` leaves. One program at a time talks in a file; a second one may go on in a fork.

What a chat service keeps as text, and computes again when its cache has forgotten it, is a file here. So `/undo` is
`kv_truncate` and computes nothing, and `/fork` is what `cp chat.kv other.kv` in a shell does.
"""

from __future__ import annotations

import libsym as sym


def obey(chat: sym.Chat, command: str, name: str) -> str:
    """Does what a line that begins with `/` says; gives what the user is told."""
    try:
        if command == "/undo":
            chat.undo()
            return "forgotten"
        if command == "/fork" and name:
            chat.fork(name).close()
            return f"kept as {name}"
    except (sym.Invalid, sym.Exists, sym.NotFound, sym.NoAccess, sym.NotDirectory) as error:
        return str(error)  # a name that is taken, say: the conversation goes on
    return "/undo, /fork NAME, /quit"


def talk(chat: sym.Chat, sampler: sym.Sampler, max_tokens: int, line: str = "") -> None:
    """Answers line after line until the user leaves, after `line`."""
    while True:
        command, _, rest = line.partition(" ")
        if command == "/quit":
            return
        try:
            if command.startswith("/"):
                sym.send_to_user(f"({obey(chat, command, rest.strip())})\n")
            elif line:
                sym.send_to_user(chat.ask(line, sampler=sampler, max_tokens=max_tokens).text())
                sym.send_to_user("\n")
        except sym.WouldBlock as error:  # before the first question: from then on nobody else talks here
            with fork_of(chat, error) as fork:
                talk(fork, sampler, max_tokens, line)
            return
        try:
            sym.send_to_user("> ")
            line = sym.recv_from_user().strip()
        except EOFError:
            return


def fork_of(chat: sym.Chat, busy: sym.WouldBlock) -> sym.Chat:
    """The conversation in a file of its own, if the user gives that a name; else the error."""
    said = str(busy)
    while True:
        sym.send_to_user(f"({said})\n(go on in a fork? its name, or nothing to leave) ")
        try:
            name = sym.recv_from_user().strip()
        except EOFError:
            name = ""
        if not name:
            raise busy
        try:
            return chat.fork(name)
        except (sym.Invalid, sym.Exists, sym.NotFound, sym.NoAccess, sym.NotDirectory) as error:
            said = str(error)


def main() -> None:
    arguments = sym.Arguments(__doc__)
    arguments.kv("file", "the conversation", "chat.kv")
    arguments.text("--system", "how a new conversation begins", "You are a helpful assistant.")
    arguments.whole("--max-tokens", "of an answer", 256)
    arguments.number("--temperature", "0 takes the likeliest token", 0.0, least=0)
    args = arguments.parse_args()
    with sym.Chat(sym.kv_open(args.file, "a"), args.system) as chat:
        talk(chat, sym.Sampler(temperature=args.temperature), args.max_tokens)


if __name__ == "__main__":
    sym.main(main)
