"""check_ctypes.py: compares the structs of examples/moe_route.py with those of moe_route.h: size of each, offset of each field."""
import ctypes
import os
import re
import subprocess
import sys
import tempfile

sys.path.insert(0, "examples")
import moe_route  # noqa: E402

structs = [s for s in vars(moe_route).values() if isinstance(s, type) and issubclass(s, ctypes.Structure)]
lines = []
expected = []
for struct in structs:
    name = "moe_route" + re.sub("([A-Z])", lambda m: "_" + m.group(1).lower(), struct.__name__)
    lines.append('printf("%%zu\\n", sizeof(%s));' % name)
    expected.append((name, ctypes.sizeof(struct)))
    for field in struct._fields_:
        lines.append('printf("%%zu\\n", offsetof(%s, %s));' % (name, field[0]))
        expected.append((name + "." + field[0], getattr(struct, field[0]).offset))
with tempfile.TemporaryDirectory() as folder:
    source, program = os.path.join(folder, "layout.c"), os.path.join(folder, "layout")
    with open(source, "w") as file:
        file.write('#include "moe_route.h"\n#include <stdio.h>\nint main(void) {\n%s\nreturn 0;\n}\n' % "\n".join(lines))
    subprocess.check_call(["cc", "-I.", source, "-o", program])
    actual = [int(line) for line in subprocess.check_output([program]).split()]
wrong = ["%s: %d in Python, %d in C" % (name, ours, theirs) for (name, ours), theirs in zip(expected, actual) if ours != theirs]
print("\n".join(wrong) if wrong else "%d structs, %d fields" % (len(structs), len(expected) - len(structs)))
sys.exit(1 if wrong or len(structs) < 6 else 0)
