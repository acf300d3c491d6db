"""TTIR as Triton prints it (dialects tt, arith, math, scf, cf) to the objects of `ir`.

Triton's Python bindings show neither successors of branches nor constants and attributes of
tensors, so the printed module is parsed. Its form is regular: an operation a line, its location at
the end, regions in braces. Values are defined before they are used; labels need not be.
"""

from __future__ import annotations

import re

from .ir import Block, Function, Op, Type, Value, matched, parse_type

_VALUE = re.compile(r"%[\w\-$.]+(?:#\d+)?")
_HEAD = re.compile(r'^(?:(%[\w\-$., :%]+?) = )?"?([a-z_]+\.[\w.]+)"?')
_ATTR = re.compile(r"(\w+) = (array<[^>]*>|\"(?:[^\"\\]|\\.)*\"|[-\w.+]+)")
_WORD = re.compile(r"(?<![%\w.#])[a-z]\w*(?=[, ]|$)")
_LOCATION = re.compile(r"\s+loc\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)")


def parse(text: str) -> list[Function]:
    """The functions of a module.

    Raises:
        NotImplementedError: a line has a form that is not known.
    """
    return _Parser(text).module()


class _Parser:
    def __init__(self, text: str) -> None:
        self.lines = [line.strip() for line in text.splitlines()]
        self.at = 0
        self.places = _Places(self.lines)
        self.names: list[dict[str, Value]] = [{}]
        self.count = 0

    # -- lines and names
    def line(self) -> str:
        """The line, without locations."""
        return _LOCATION.sub("", self.lines[self.at])

    def place(self) -> str:
        return self.places.of(self.lines[self.at])

    def define(self, name: str, type: Type, block: Block, op: Op | None = None, index=0) -> Value:
        value = Value(f"v{self.count}", type, block, op, index)
        self.count += 1
        self.names[-1][name] = value
        return value

    def use(self, name: str) -> Value:
        return next(scope[name] for scope in reversed(self.names) if name in scope)

    def values(self, text: str) -> list[Value]:
        return [self.use(name) for name in _VALUE.findall(text)]

    # -- structure
    def module(self) -> list[Function]:
        functions = []
        while self.at < len(self.lines):
            if self.lines[self.at].startswith("tt.func"):
                functions.append(self.function())
            else:
                self.at += 1
        return functions

    def function(self) -> Function:
        line, entry = self.line(), Block("entry")
        found = matched(r".*?@([\w.$\-]+|\"[^\"]*\")\(", line)
        start = end = found.end()
        depth = 1
        while depth:
            depth += {"(": 1, ")": -1}.get(line[end], 0)
            end += 1
        self.names.append({})
        self.arguments(line[start : end - 1], entry)
        self.at += 1
        names = [name.lstrip("%") for name in self.names[-1]]
        function = Function(found.group(1).strip('"'), entry.args, [], names)
        if line.endswith("{"):
            function.blocks = self.blocks(entry)
            self.at += 1
        self.names.pop()
        return function

    def arguments(self, given: str, block: Block) -> None:
        for part in split_types(given):
            name, _, text = part.partition(": ")
            type = parse_type(re.sub(r" \{.*\}$", "", text))
            block.args.append(self.define(name.strip(), type, block, index=len(block.args)))

    def blocks(self, entry: Block) -> list[Block]:
        """The blocks of a region, up to the line that begins with "}"."""
        blocks, block = [entry], entry
        while not (line := self.line()).startswith("}"):
            if line.startswith("^"):
                label, args = matched(r"\^(\w+)(?:\((.*)\))?:", line).groups()
                block = Block(label)
                blocks.append(block)
                self.arguments(args or "", block)
                self.at += 1
            elif line:
                block.ops.append(self.op(line, block))
            else:
                self.at += 1
        return blocks

    def region(self, op: Op, *args: tuple[str, Type]) -> str:
        """Parse a region of an operation; returns its closing line and goes on after it."""
        self.names.append({})
        block = Block("entry")
        for name, type in args:
            block.args.append(self.define(name, type, block, index=len(block.args)))
        op.regions.append(self.blocks(block))
        self.names.pop()
        line = self.line()
        op.place = op.place or self.place()
        self.at += 1
        return line

    def op(self, line: str, block: Block) -> Op:
        head = _HEAD.match(line)
        if not head:
            raise NotImplementedError(f"{self.place()}: {line}")
        op = Op(head.group(2), line, block, place=self.place())
        rest = line[head.end() :]
        self.at += 1
        parse = getattr(self, "op_" + op.name.replace(".", "_"), self.plain)
        types = parse(op, rest)
        if head.group(1):
            self.results(op, head.group(1), types)
        for operand in [*op.operands, *(v for _, args in op.successors for v in args)]:
            operand.uses.append(op)
        return op

    def results(self, op: Op, text: str, types: list[Type]) -> None:
        names = []
        for part in text.split(","):
            base, _, count = part.strip().partition(":")
            names += [f"{base}#{k}" for k in range(int(count))] if count else [base]
        if len(types) == 1:
            types = types * len(names)
        for name, type in zip(names, types, strict=True):
            value = self.define(name, type, op.block, op, len(op.results))
            self.names[-1][name.removesuffix("#0")] = value
            op.results.append(value)

    # -- forms of operations: operands and attributes into `op`; returns the types of results
    def plain(self, op: Op, rest: str) -> list[Type]:
        """`%a, %b {attributes} : types`, with `A -> B`, `A to B` or `(A, B) -> C` as types."""
        body, types = split_colon(rest)
        bare = re.sub(r"\{.*\}|\"[^\"]*\"", "", body)
        op.attrs = attributes(body)
        op.attrs["words"] = _WORD.findall(bare)
        op.operands = self.values(bare)
        for arrow in (" -> ", " to "):
            if arrow in types:
                return parse_types(types.split(arrow)[-1])
        found = parse_types(types)
        if op.name == "tt.unsplat":  # the operand's type is printed
            return [found[0].with_sizes(None)]
        return found[:1] if op.name == "tt.addptr" else found[-1:]

    def op_arith_constant(self, op: Op, rest: str) -> list[Type]:
        rest = rest.strip()
        if rest in ("true", "false"):
            op.attrs["value"] = rest
            return [Type("i1")]
        value, _, type = rest.rpartition(" : ")
        value = re.sub(r"^\{.*?\}\s*", "", value.strip())
        op.attrs["value"] = re.sub(r"^dense<(.*)>$", r"\1", value)
        return [parse_type(type)]

    def op_arith_cmpi(self, op: Op, rest: str) -> list[Type]:
        body, types = split_colon(rest)
        op.attrs["predicate"] = body.split(",")[0].strip()
        op.operands = self.values(body)
        return [Type("i1", parse_type(types).sizes)]

    op_arith_cmpf = op_arith_cmpi

    def op_tt_load(self, op: Op, rest: str) -> list[Type]:
        body, types = split_colon(rest)
        op.operands = self.values(body)
        pointer = parse_types(types)[0]
        assert pointer.pointee is not None
        return [pointer.pointee.with_sizes(pointer.sizes)]

    def no_results(self, op: Op, rest: str) -> list[Type]:
        op.operands = self.values(split_colon(rest)[0])
        return []

    op_tt_store = op_tt_return = op_scf_yield = op_scf_condition = no_results
    op_tt_reduce_return = op_tt_scan_return = op_tt_map_elementwise_return = no_results

    def op_tt_call(self, op: Op, rest: str) -> list[Type]:
        name, values, types = matched(
            r"\s*@(\"[^\"]*\"|[\w.$\-]+)\((.*?)\)[^:]* : \(.*\) -> (.*)$", rest
        ).groups()
        op.attrs["callee"] = name.strip('"')
        op.operands = self.values(values)
        return parse_types(types)

    def op_tt_assert(self, op: Op, rest: str) -> list[Type]:
        op.attrs["message"] = matched(r'.*?"(.*?)"', rest).group(1)
        op.operands = self.values(rest.split(",")[0])
        return []

    def combining(self, op: Op, rest: str) -> list[Type]:
        op.operands = self.values(rest[: rest.index(")")])
        op.attrs = attributes(rest)
        # The arguments of the region stand in its first line, as a label's do.
        line = self.region(op)
        op.regions[0] = [block for block in op.regions[0] if block.ops]
        return parse_types(line.split(" -> ")[-1])

    op_tt_reduce = op_tt_scan = op_tt_map_elementwise = combining

    def op_scf_for(self, op: Op, rest: str) -> list[Type]:
        head = matched(r"(?: unsigned)? (%\S+) = (%\S+) to (%\S+) step (%\S+)", rest)
        op.attrs["unsigned"] = rest.startswith(" unsigned")
        op.operands = [self.use(head.group(k)) for k in (2, 3, 4)]
        args, types = [(head.group(1), op.operands[0].type)], []
        carried = re.search(r"iter_args\((.*?)\) -> \((.*?)\)\s*(?::[^()]*)?\{$", rest)
        if carried:
            types = parse_types(carried.group(2))
            args += self.carried(op, carried.group(1), types)
        self.region(op, *args)
        return types

    def carried(self, op: Op, text: str, types: list[Type]) -> list[tuple[str, Type]]:
        """`%arg = %init, ...`: the initial values become operands."""
        pairs = re.findall(r"(%[\w$.\-]+) = (%[\w$.\-#]+)", text)
        op.operands += [self.use(init) for _, init in pairs]
        return [(name, type) for (name, _), type in zip(pairs, types, strict=True)]

    def op_scf_if(self, op: Op, rest: str) -> list[Type]:
        op.operands = self.values(rest)[:1]
        types = re.search(r"-> \((.*)\) \{$", rest)
        if self.region(op).startswith("} else {"):
            self.region(op)
        return parse_types(types.group(1)) if types else []

    def op_scf_while(self, op: Op, rest: str) -> list[Type]:
        inits, types, results = matched(r"\s*(?:\((.*?)\))? : \((.*?)\) -> (.*) \{$", rest).groups()
        args = self.carried(op, inits or "", parse_types(types))
        self.region(op, *args)
        self.region(op)
        # The second region's arguments stand in its first line.
        op.regions[1] = op.regions[1][-1:]
        return parse_types(results)

    def successor(self, text: str) -> tuple[str, list[Value]]:
        label, args = matched(r"\s*\^(\w+)(?:\((.*)\))?", text).groups()
        return label, self.values(args.split(" : ")[0]) if args else []

    def op_cf_br(self, op: Op, rest: str) -> list[Type]:
        op.successors = [self.successor(rest)]
        return []

    def op_cf_cond_br(self, op: Op, rest: str) -> list[Type]:
        condition, *labels = split_types(re.sub(r"\s*\{[^}]*\}\s*(?::.*)?$", "", rest))
        op.operands = [self.use(condition)]
        op.successors = [self.successor(label) for label in labels]
        return []


class _Places:
    """Where in the kernels' sources operations come from: `#loc3 = loc("file.py":12:4)`."""

    def __init__(self, lines: list[str]) -> None:
        found = (re.match(r"#(loc\w*) = loc\((.*)\)$", line) for line in lines)
        self.known = {match.group(1): match.group(2) for match in found if match}

    def of(self, line: str) -> str:
        """ "file.py:12" of a line; of what Triton's own functions do, the line that calls them."""
        found = _LOCATION.findall(line)
        path, number = self.resolve(found[-1]) if found else ("", "")
        return f"{path.rpartition('/')[2]}:{number}" if path else ""

    def resolve(self, text: str) -> tuple[str, str]:
        if direct := re.search(r'"([^"]*)":(\d+):\d+', text):
            return direct.group(1), direct.group(2)
        found = ("", "")
        for name in re.findall(r"#(loc\w*)", text):  # of a call: the callee's, then the caller's
            found = self.resolve(self.known.get(name, ""))
            if found[0] and "/triton/language/" not in found[0]:
                break
        return found


def attributes(text: str) -> dict:
    """What is printed as `key = value`."""
    return {key: value.strip('"') for key, value in _ATTR.findall(text)}


def split_types(text: str) -> list[str]:
    """Split at commas outside of <> and ()."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        if c in "<(":
            depth += 1
        elif c == ")" or (c == ">" and text[i - 1] != "-"):
            depth -= 1
        elif c == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    last = text[start:].strip()
    return [*parts, last] if last else parts


def parse_types(text: str) -> list[Type]:
    """Types separated by commas, with or without parentheses around them."""
    text = text.strip()
    if text.startswith("(") and text.endswith(")"):
        text = text[1:-1]
    return [parse_type(part) for part in split_types(text)]


def split_colon(text: str) -> tuple[str, str]:
    """Split at the first " : " outside of brackets and strings; the second part may be empty."""
    depth, quoted = 0, False
    for i, c in enumerate(text):
        if c == '"':
            quoted = not quoted
        elif not quoted and c in "{(":
            depth += 1
        elif not quoted and c in "})":
            depth -= 1
        elif not quoted and depth == 0 and text[i : i + 3] == " : ":
            return text[:i], text[i + 3 :]
    return text, ""
