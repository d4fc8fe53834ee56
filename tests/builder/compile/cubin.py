"""Reads what tests ask of a cubin: an ELF file, whose .nv.info sections say what its kernels take."""

from __future__ import annotations

import struct

CUDA_MACHINE = 190  # e_machine of NVIDIA's ELF files
PARAMETER_BYTES = 0x19  # attribute: bytes of a kernel's parameters, in the record itself
IN_RECORD = 3  # format: the record holds the value; the others are followed by one


def sections(image: bytes) -> dict[str, bytes]:
    """Contents of every section of a 64-bit ELF file, by name."""
    assert image[:5] == b"\x7fELF\x02", "a 64-bit ELF file"
    assert struct.unpack_from("<H", image, 18)[0] == CUDA_MACHINE
    (table,) = struct.unpack_from("<Q", image, 40)
    size, count, names_index = struct.unpack_from("<HHH", image, 58)
    headers = [struct.unpack_from("<IIQQQQ", image, table + number * size) for number in range(count)]
    names_offset = headers[names_index][4]
    found = {}
    for name, _kind, _flags, _address, offset, length in headers:
        start = names_offset + name
        found[image[start : image.index(b"\0", start)].decode()] = image[offset : offset + length]
    return found


def parameter_bytes(image: bytes) -> dict[str, int]:
    """Bytes of the parameters of every kernel, by name."""
    prefix, found = ".nv.info.", {}
    for name, content in sections(image).items():
        if not name.startswith(prefix):
            continue
        offset = 0
        while offset < len(content):
            form, attribute, value = struct.unpack_from("<BBH", content, offset)
            offset += 4 if form <= IN_RECORD else 4 + value
            if (form, attribute) == (IN_RECORD, PARAMETER_BYTES):
                found[name.removeprefix(prefix)] = value
    return found
