"""Talks with you and keeps the conversation in a KV file, which outlasts restarts of the daemon.

    symphony run chat
    symphony run chat --system "You are a pirate." pirate.kv

Lines are questions, `/help` lists the commands, Ctrl-C ends an answer or drops a line, arrow keys bring lines back.
"""

import readline  # makes the lines of input() editable
import sys

import libsym as sym


class Talk:
    """The loop that reads the user's lines and answers them in a conversation."""

    def __init__(self, chat: sym.Chat, max_tokens: int) -> None:
        self.chat, self.most, self.system, self.at = chat, max_tokens, list[dict[str, str]](), 0

    def obey(self, command: str, rest: str) -> str:
        """Carry out a command, a line that begins with `/`; return the reply for the user."""
        if command == "/undo":
            self.chat.undo()
            return "forgotten"
        if command == "/fork" and rest:
            self.chat.fork(rest).close()
            return f"kept as {rest}"
        if command == "/system" and rest:
            self.system, self.at = [{"role": "system", "content": rest}], sys.maxsize  # the file does not have it yet
            return "from the next question on"
        if command == "/stats":
            return f"{self.chat.kv.len():,} of {sym.model_info().max_positions:,} tokens of the context are used"
        wrong = "" if command in {"/help", "/fork", "/system"} else f"{command} is no command: "
        return f"""{wrong}/undo forgets the last question and answer, /fork NAME keeps the conversation in another file,
/system TEXT tells the model how to behave from now on, /stats says how full the context is, /quit leaves"""

    def answer(self, line: str) -> None:
        """Stream an answer. Ctrl-C ends the answer, and the conversation keeps the part that was shown."""
        length, question = self.chat.kv.len() + len(self.chat.pending), {"role": "user", "content": line}
        system, self.at = self.system if length <= self.at else [], min(length, self.at)
        try:
            sym.send_to_user(self.chat.ask([*system, question], max_tokens=self.most).text())
        except KeyboardInterrupt:
            self.chat.settle()
        sym.send_to_user("\n" if self.chat.kv.room() else "\n(the context is full: /undo makes room)\n")

    def go_on(self, line: str = "") -> None:
        """Answer `line`, and then each line of the user until /quit."""
        while line != "/quit":
            command, _, rest = line.partition(" ")
            try:
                if command.startswith("/"):
                    sym.send_to_user(f"({self.obey(command, rest.strip())})\n")
                elif line:
                    self.answer(line)
            except sym.WouldBlock as error:  # only the first question locks the file
                with fork_of(self.chat, error) as self.chat:
                    self.go_on(line)
                return
            except (sym.NotConnected, sym.ProtocolError):
                raise
            except sym.SymError as error:  # for example, a name is taken or the context is full
                sym.send_to_user(f"({error})\n")
            line = prompted("> ", at_end="/quit")


def fork_of(chat: sym.Chat, busy: sym.WouldBlock) -> sym.Chat:
    """Ask the user for a name, and return a fork of the conversation with it. Without a name, raise `busy`."""
    sym.send_to_user(f"({busy})\n")
    while name := prompted("(go on in a fork? its name, or nothing to leave) ", at_end=""):
        try:
            return chat.fork(name)
        except sym.SymError as error:
            sym.send_to_user(f"({error})\n")
    raise busy


def prompted(prompt: str, at_end: str) -> str:
    """Return the user's next line, or `at_end` at the end of the input. On a terminal Ctrl-C drops a line."""
    interrupted = (KeyboardInterrupt,) if sys.stdin.isatty() else ()
    while True:
        try:
            sym.send_to_user("" if interrupted else prompt)
            return (input(prompt) if interrupted else sym.recv_from_user()).strip()
        except EOFError:
            return at_end
        except interrupted:
            sym.send_to_user("\n")


def show(kv: sym.KV, mark: str = "a question") -> None:
    """Show the last two turns of the file, and put the questions of all turns into the history of the arrow keys."""
    special, (tokens, _), starts = frozenset(sym.model_info().special_ids), kv.read(), kv.stat().turns or []
    parts = [tokens[at:end] for at, end in zip(starts, [*starts[1:], None], strict=False)]
    parts.append(sym.chat_tokens([{"role": "user", "content": mark}], after_answer=True))
    *turns, asked = (sym.detokenize([token for token in part if token not in special]) for part in parts)
    head, _, tail = asked.partition(mark)
    for turn in turns:
        readline.add_history(turn.partition(tail)[0].rpartition(head.lstrip())[2])
    sym.send_to_user("".join(turns[-2:]).strip() + "\n" * bool(turns))


@sym.command
def main(arguments: sym.Arguments) -> None:
    arguments.kv("file", "the conversation", "chat.kv")
    arguments.text("--system", "how a new conversation begins (default: You are a helpful assistant.)")
    arguments.whole("--max-tokens", "of an answer", 256)
    arguments.number("--temperature", "0 takes the likeliest token", 0.0, least=0)
    args = arguments.parse_args()
    kv, system = sym.kv_open(args.file, "a"), args.system or "You are a helpful assistant."
    with sym.Chat(kv, system, temperature=args.temperature) as chat:
        if args.system and kv.len():
            sym.send_to_user("(the conversation goes on as it began: /system TEXT changes how the model behaves)\n")
        if sys.stdin.isatty():
            show(kv)
        Talk(chat, args.max_tokens).go_on()
