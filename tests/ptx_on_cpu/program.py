"""PTX text to instructions and variables. What is not understood is an error, never skipped."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

# Every variable starts at a multiple of this, which no alignment exceeds, with at least as many bytes before it that
# belong to none: an overrun does not reach the neighbour unseen.
GAP = 16


class PtxError(Exception):
    """The text, or what it does when it runs, is wrong or not known here."""


@dataclass(frozen=True)
class Variable:
    """Bytes of a space: "shared", "local", "parameter" (of a kernel) or "argument" (of a call, or its result)."""

    name: str
    space: str
    offset: int
    size: int


@dataclass(frozen=True)
class Instruction:
    text: str
    function: str
    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[str, ...]
    guard: str | None  # a predicate register: the lanes where it is `guard_value` execute
    guard_value: bool
    variables: Mapping[str, Variable]  # those in scope


@dataclass
class Function:
    """A kernel, or a function that one calls. Nothing recurses: registers and variables have one place each."""

    name: str
    is_kernel: bool
    first: int  # index of its first instruction
    parameters: list[Variable]
    results: list[Variable]
    register_types: dict[str, str] = field(default_factory=dict)  # by a register's name without its number
    labels: dict[str, int] = field(default_factory=dict)


@dataclass
class Program:
    """A module: all instructions, one function after the other."""

    instructions: list[Instruction] = field(default_factory=list)
    functions: dict[str, Function] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)

    def target(self, instruction: Instruction) -> int:
        """Index of the instruction that a branch goes to."""
        return self.functions[instruction.function].labels[instruction.operands[0]]

    def size_of(self, space: str) -> int:
        return max((v.offset + v.size for v in self.variables if v.space == space), default=0)


def split_operands(text: str) -> tuple[str, ...]:
    """At the commas that are outside of brackets."""
    return tuple(operand.strip() for operand in re.split(r",(?![^{(\[]*[})\]])", text)) if text.strip() else ()


VARIABLE = re.compile(
    r"\.(?P<space>shared|local|param)\s+(?:\.align\s+\d+\s+)?"
    r"\.[busf](?P<bits>8|16|32|64)\s+(?:\.ptr\s+(?:\.align\s+\d+\s+)?)?(?P<name>[\w$]+)(?:\[(?P<count>\d+)\])?$"
)
REGISTERS = re.compile(r"\.reg\s+\.(?P<type>\w+)\s+(?P<name>[%\w]+?)(?:<\d+>)?$")
FUNCTION = re.compile(
    r"(?:\.visible\s+|\.weak\s+)?\.(?P<kind>entry|func)\s*(?:\((?P<results>[^)]*)\)\s*)?(?P<name>[\w$]+)\s*"
    r"\((?P<parameters>[^)]*)\)\s*(?:\.(?:maxntid|minnctapersm|noinline)\b[^\n]*\s*)*(?P<end>[{;])"
)
INSTRUCTION = re.compile(
    r"(?:@(?P<not>!?)(?P<guard>%\w+)\s+)?(?P<opcode>[a-z]\w*)(?P<modifiers>(?:\.\w+)*)\s*(?P<operands>.*)$"
)
LABEL = re.compile(r"([$\w]+):")
STATEMENT = re.compile(r"[^;]+;")
MODULE_LINE = re.compile(r"\.(?:version|target|address_size)\b[^\n]*\n")
SPACE = re.compile(r"\s*")


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = re.sub(r"//[^\n]*", "", text)
        self.position = 0
        self.program = Program()
        self.scope: dict[str, Variable] = {}

    def take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self.text, self.position)
        if found:
            self.position = found.end()
        return found

    def at_end(self) -> bool:
        self.take(SPACE)
        return self.position == len(self.text)

    def module(self) -> Program:
        while not self.at_end():
            if self.take(MODULE_LINE):
                continue
            if header := self.take(FUNCTION):
                if header["end"] == "{":
                    self.function(header)
            elif statement := self.take(STATEMENT):
                variable = self.declare(statement[0].rstrip(";"))
                self.scope[variable.name] = variable
        return self.program

    def declare(self, text: str, space: str | None = None) -> Variable:
        found = VARIABLE.match(" ".join(text.split()))
        if found is None:
            raise PtxError(f"not a declaration that is known: {text.strip()[:200]}")
        space = space or {"param": "argument"}.get(found["space"], found["space"])
        end = self.program.size_of(space)
        offset = -(-end // GAP) * GAP + GAP
        variable = Variable(found["name"], space, offset, int(found["bits"]) // 8 * int(found["count"] or 1))
        self.program.variables.append(variable)
        return variable

    def function(self, header: re.Match[str]) -> None:
        is_kernel = header["kind"] == "entry"
        parameters = [
            self.declare(text, "parameter" if is_kernel else "argument")
            for text in split_operands(header["parameters"])
        ]
        results = [self.declare(text, "argument") for text in split_operands(header["results"] or "")]
        function = Function(header["name"], is_kernel, len(self.program.instructions), parameters, results)
        self.program.functions[function.name] = function
        module_scope = self.scope
        self.scope = {**module_scope, **{variable.name: variable for variable in [*parameters, *results]}}
        depth = 1
        while depth:
            if self.at_end():
                raise PtxError(f"{function.name} has no end")
            if self.text[self.position] in "{}":
                depth += 1 if self.text[self.position] == "{" else -1
                self.position += 1
            elif label := self.take(LABEL):
                function.labels[label[1]] = len(self.program.instructions)
            elif statement := self.take(STATEMENT):
                self.statement(function, " ".join(statement[0].rstrip(";").split()))
        self.scope = module_scope
        if self.program.instructions[-1].opcode not in ("ret", "bra", "exit"):
            raise PtxError(f"{function.name} runs past its end")

    def statement(self, function: Function, text: str) -> None:
        if text.startswith(".pragma"):
            return
        if registers := REGISTERS.match(text):
            function.register_types[registers["name"]] = registers["type"]
        elif text.startswith("."):
            variable = self.declare(text)
            self.scope = {**self.scope, variable.name: variable}  # a new one: instructions before keep theirs
        elif found := INSTRUCTION.match(text):
            self.program.instructions.append(
                Instruction(
                    text=text,
                    function=function.name,
                    opcode=found["opcode"],
                    modifiers=tuple(found["modifiers"].split(".")[1:]),
                    operands=split_operands(found["operands"]),
                    guard=found["guard"],
                    guard_value=not found["not"],
                    variables=self.scope,
                )
            )
        else:
            raise PtxError(f"not an instruction: {text}")


def parse(text: str) -> Program:
    """Raises PtxError where the text has something that is not known here."""
    return _Parser(text).module()
