"""Files with bytes changed at random, and what a reader may answer to them."""

import random
from collections.abc import Callable
from pathlib import Path

from vllm_hsd.errors import UserError

COUNT = 400


def damaged(rng: random.Random, content: bytes) -> bytes:
    """The content cut off, longer, with other bits, bytes or ranges."""
    content = bytearray(content)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        at = rng.randrange(len(content) + 1)
        end = min(len(content), at + rng.choice([1, 4, 8, 64]))
        change = rng.choice(["cut", "more", "flip", "zeros", "random", "swap", "remove"])
        if change == "cut":
            del content[at:]
        elif change == "more":
            content += rng.randbytes(rng.randint(1, 40))
        elif change == "flip" and at < len(content):
            content[at] ^= 1 << rng.randrange(8)
        elif change == "zeros":
            content[at:end] = bytes(end - at)
        elif change == "random":
            content[at:end] = rng.randbytes(end - at)
        elif change == "swap":
            content = content[at:] + content[:at]
        elif change == "remove":
            del content[at:end]
    return bytes(content)


def sentence_objection(message: str, name: str, longest: int = 500) -> str | None:
    """What keeps a message from being one sentence that names the file."""
    if "\n" in message or not message.endswith(".") or len(message) >= longest:
        return f"is not one sentence: {message[:300]!r}"
    return None if name in message else f"does not name the file: {message}"


def objection(read: Callable[[str], object], valid: Callable, path: Path) -> str | None:
    """What is wrong with the answer to a file, None if nothing is."""
    try:
        found = read(str(path))
    except UserError as error:
        return sentence_objection(str(error), path.name)
    except Exception as error:
        return f"raises {type(error).__name__}: {str(error)[:100]}"
    return None if valid(found) else "accepts what is not valid"


def objections(read: Callable, valid: Callable, content: bytes, scratch: Path) -> list[str]:
    """Objections over `COUNT` damaged copies; every path is new, since readers keep results."""
    rng, found = random.Random(0), []
    for i in range(COUNT):
        path = scratch / f"{read.__name__}-{i}"
        path.write_bytes(damaged(rng, content))
        if said := objection(read, valid, path):
            found.append(said)
        path.unlink()
    return found
