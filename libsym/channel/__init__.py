"""Both halves of the channel. Their C and their Python are of one release, or nothing of it may run."""

from libsym import _channel
from libsym.abi import ABI_VERSION

if _channel.lib.SYM_ABI_VERSION != ABI_VERSION:
    raise ImportError(
        f"{_channel.__file__} is of ABI version {_channel.lib.SYM_ABI_VERSION}, and the Python beside it of version "
        f"{ABI_VERSION}: install or build Symphony anew"
    )
