"""Just enough GGUF: read the header, write a file of float32 tensors. Standard library only."""

import math
import struct
from collections import namedtuple
from pathlib import Path

ALIGNMENT = 32
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY, FLOAT32, UINT32 = 8, 9, 6, 4

Tensor = namedtuple("Tensor", "name dims type offset size")  # offset in the file; size includes padding


class Header:
    def __init__(self, path):
        with open(path, "rb") as file:
            self.file = file
            if file.read(4) != b"GGUF":
                raise ValueError(f"{path} is not a GGUF file")
            _version, n_tensors, n_kv = self.scalars("IQQ")
            self.kv = {}
            for _ in range(n_kv):
                key = self.string()
                self.kv[key] = self.value(self.scalars("I")[0])
            infos = []
            for _ in range(n_tensors):
                name = self.string()
                (n_dims,) = self.scalars("I")
                dims = self.scalars(f"{n_dims}Q")
                infos.append((name, dims, *self.scalars("IQ")))
            align = self.kv.get("general.alignment", ALIGNMENT)
            self.data = -(-file.tell() // align) * align
        ends = sorted(offset for *_, offset in infos) + [Path(path).stat().st_size - self.data]
        self.tensors = [Tensor(name, dims, kind, self.data + offset, ends[ends.index(offset) + 1] - offset)
                        for name, dims, kind, offset in infos]

    def scalars(self, kinds):
        return struct.unpack("<" + kinds, self.file.read(struct.calcsize("<" + kinds)))

    def string(self):
        return self.file.read(self.scalars("Q")[0]).decode()

    def value(self, kind):
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            item, n = self.scalars("IQ")
            if item in SCALARS:
                return self.scalars(f"{n}{SCALARS[item]}")
            return [self.value(item) for _ in range(n)]
        return self.scalars(SCALARS[kind])[0]

    def arch(self, key):
        return self.kv[f"{self.kv['general.architecture']}.{key}"]

    def experts(self):
        """The tensors that hold routed experts, one after the other in the last dimension."""
        return [t for t in self.tensors if t.name.endswith("exps.weight")]


def write(path, kv, tensors):
    """kv: {key: str | int | float}, tensors: {name: (dims, bytes of float32)}."""
    def string(s):
        return struct.pack("<Q", len(s)) + s.encode()

    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(kv))
    for key, value in kv.items():
        head += string(key)
        if isinstance(value, str):
            head += struct.pack("<I", STRING) + string(value)
        elif isinstance(value, int):
            head += struct.pack("<II", UINT32, value)
        else:
            head += struct.pack("<If", FLOAT32, value)
    body = b""
    for name, (dims, data) in tensors.items():
        if len(data) != 4 * math.prod(dims):
            raise ValueError(f"{name}: {len(data)} bytes for {dims}")
        head += string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, 0, len(body))
        body += data + bytes(-len(data) % ALIGNMENT)
    Path(path).write_bytes(head + bytes(-len(head) % ALIGNMENT) + body)
