"""The models that the daemon serves, and the operations by which programs ask for them: MODEL_INFO and USE_MODEL.

A KV file belongs to one model, for good: the number of its table's pool is the model's number. So an operation on an
open file asks `Models.of` for the file's model. An operation without a file asks for the connection's model, which is
the first one until USE_MODEL chooses another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvfs.fs import OpenKv
from libsym.abi import Op
from libsym.errors import Invalid
from scheduler.connection.lip import Lip
from scheduler.connection.system_call import SystemCall
from scheduler.operations.appending import Limited
from scheduler.operations.operation import Operation, Table
from scheduler.operations.text import TextModel
from scheduler.wire.payloads import text_of
from scheduler.wire.replies import Reply, json_reply


@dataclass(frozen=True, slots=True, eq=False)
class ServedModel:
    """A model that the daemon serves."""

    number: int
    """The number of the pool that holds the pages of the model's files."""
    name: str
    text: TextModel
    limited: Limited


class Models:
    """The table of served models. The first one is the default."""

    def __init__(self, texts: Mapping[str, TextModel]) -> None:
        """`texts` has the text of each model by the model's name, in the order of the arenas. It has at least one."""
        named = enumerate(texts.items())
        self._served = tuple(ServedModel(number, name, text, Limited(text)) for number, (name, text) in named)
        self._by_name = {each.name: each for each in self._served}

    def __iter__(self) -> Iterator[ServedModel]:
        return iter(self._served)

    @property
    def default(self) -> ServedModel:
        return self._served[0]

    def numbered(self, number: int) -> ServedModel:
        """Return a model by its number."""
        return self._served[number]

    def of(self, file: OpenKv) -> ServedModel:
        """Return the model of an open file."""
        return self._served[file.table.pool.number]

    def of_lip(self, lip: Lip) -> ServedModel:
        """Return the model of a connection."""
        return self._served[lip.model]

    def named(self, name: str) -> ServedModel:
        """Return a model by its name. Invalid: no served model has this name."""
        found = self._by_name.get(name)
        if found is None:
            served = ", ".join(each.name for each in self)
            raise Invalid(f"there is no model {name[:60]!r} here: this daemon serves {served}")
        return found

    def asked(self, lip: Lip, name: str) -> ServedModel:
        """Return the model that a request names; without a name, the connection's model."""
        return self.named(name) if name else self.of_lip(lip)


class Choosing:
    """Answers MODEL_INFO and USE_MODEL."""

    def __init__(self, models: Models) -> None:
        self._models = models

    def table(self) -> Table:
        return {Op.MODEL_INFO: Operation(self._info), Op.USE_MODEL: Operation(self._use)}

    def _info(self, call: SystemCall) -> Reply:
        return json_reply(self._models.asked(call.lip, text_of(call.request)).text.info())

    def _use(self, call: SystemCall) -> Reply:
        """Choose the model of a connection for texts and for new files. Open files keep their models."""
        call.lip.model = self._models.named(text_of(call.request)).number
        return Reply()
