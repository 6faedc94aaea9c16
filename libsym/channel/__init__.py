"""Both halves of the channel. The import fails if the C and the Python code come from different releases."""

from libsym._channel import __file__ as _path
from libsym._channel import lib as _lib
from libsym.abi import ABI_VERSION

if _lib.SYM_ABI_VERSION != ABI_VERSION:
    raise ImportError(
        f"{_path} is of ABI version {_lib.SYM_ABI_VERSION}, and the Python beside it of version {ABI_VERSION}: install "
        "or build Symphony anew"
    )
