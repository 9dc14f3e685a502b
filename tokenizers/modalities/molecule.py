"""Molecules as SMILES strings, one a medium; exact.

Checked against the grammar of OpenSMILES 1.0 (sections 2 and 3): atoms, bonds, branches, ring closures in
pairs. The chemistry (valences, aromaticity) is not checked, and the string is not made canonical: it comes
back as it was.
"""

from __future__ import annotations

import re

from ernie5.protocol.errors import InvalidInputError, InvalidMediaError, MediaTooLargeError
from ernie5.protocol.modalities import MODALITIES
from ernie5.tokenizers.modalities.codec import SAMPLES, Figure, SampleFile, TextCodec, utf8

MAX_LENGTH = 10_000

_ELEMENTS = """
H He Li Be B C N O F Ne Na Mg Al Si P S Cl Ar K Ca Sc Ti V Cr Mn Fe Co Ni Cu Zn Ga Ge As Se Br Kr Rb
Sr Y Zr Nb Mo Tc Ru Rh Pd Ag Cd In Sn Sb Te I Xe Cs Ba La Ce Pr Nd Pm Sm Eu Gd Tb Dy Ho Er Tm Yb Lu
Hf Ta W Re Os Ir Pt Au Hg Tl Pb Bi Po At Rn Fr Ra Ac Th Pa U Np Pu Am Cm Bk Cf Es Fm Md No Lr Rf Db
Sg Bh Hs Mt Ds Rg Cn Nh Fl Mc Lv Ts Og b c n o p s se as te
"""
_SYMBOLS = "|".join(sorted(_ELEMENTS.split(), key=len, reverse=True))
_TOKEN = re.compile(
    rf"(?P<atom>\[\d{{0,3}}(?:{_SYMBOLS}|\*)(?:@@|@(?:TH[12]|AL[12]|SP[123]|TB\d\d?|OH\d\d?)?)?(?:H\d?)?"
    r"(?:\+\+|--|[+-]\d{0,2})?(?::\d{1,4})?\]|Br|Cl|[BCNOPSFIbcnops*])"
    r"|(?P<bond>[-=#$:/\\])|(?P<ring>\d|%\d\d)|(?P<open>\()|(?P<close>\))|(?P<dot>\.)"
)


class MoleculeCodec(TextCodec[str]):
    """A SMILES string, exact."""

    modality = MODALITIES["molecule"]
    content_types = ("chemical/x-daylight-smiles",)
    promise = "the string exact"
    sample = SampleFile(
        SAMPLES / "molecule.smi", content_types[0], "caffeine, written for this package", "a fact"
    )

    def read(self, data: bytes, content_type: str) -> str:
        smiles = utf8(data, "SMILES").strip(" \t\r\n")
        if len(smiles) > MAX_LENGTH:
            raise MediaTooLargeError(f"SMILES of {len(smiles)} characters exceeds {MAX_LENGTH}", param="data")
        if re.search(r"\s", smiles):
            raise InvalidMediaError(
                "one molecule a medium, without a name behind it: SMILES has no spaces", param="data"
            )
        problem = smiles_problem(smiles)
        if problem:
            raise InvalidMediaError(f"not SMILES: {problem}", param="data")
        return smiles

    def write(self, value: str, content_type: str) -> bytes:
        return f"{value}\n".encode()

    def to_text(self, value: str) -> str:
        return value

    def from_text(self, text: str) -> str:
        problem = smiles_problem(text)
        if problem:
            raise InvalidInputError(f"the tokens are no SMILES: {problem}", param="codes")
        return text

    def compare(self, original: str, decoded: str) -> Figure:
        wrong = sum(left != right for left, right in zip(original, decoded)) + abs(
            len(original) - len(decoded)
        )
        return Figure("characters that differ", wrong, "", 0)


def smiles_problem(smiles: str) -> str | None:
    """What is wrong with a SMILES string, None where its grammar is right.

    >>> smiles_problem("c1ccccc1O"), smiles_problem("C1CC")
    (None, 'ring 1 is opened but not closed')
    """
    if not smiles:
        return "it is empty"
    at, before = 0, "start"  # what the last token was
    atoms = 0
    branches: list[int] = []
    rings: dict[int, int] = {}  # number -> atom that opened it
    here = 0  # the atom that the next bond starts from
    while at < len(smiles):
        match = _TOKEN.match(smiles, at)
        if match is None:
            return f"{smiles[at : at + 8]!r} at {at} is no atom, bond, ring or branch"
        kind = match.lastgroup or ""
        if kind == "atom":
            atoms += 1
            here = atoms
        elif kind == "ring":
            if before not in ("atom", "ring", "bond", "close") or not atoms:
                return f"ring closure at {at} follows no atom"
            number = int(match[0].removeprefix("%"))
            if rings.get(number) == here:
                return f"ring {number} at {at} closes on its own atom"
            if rings.pop(number, None) is None:
                rings[number] = here
        elif kind == "bond":
            if before not in ("atom", "ring", "open", "close"):
                return f"bond at {at} follows no atom"
        elif kind == "open":
            if before not in ("atom", "ring", "close"):
                return f"branch at {at} follows no atom"
            branches.append(here)
        elif kind == "close":
            if before not in ("atom", "ring", "close") or not branches:
                return f"')' at {at} closes no branch"
            here = branches.pop()
        elif before not in ("atom", "ring", "open", "close"):
            return f"'.' at {at} follows no atom"
        before, at = kind, match.end()
    if before in ("bond", "dot"):
        return "it ends in a bond or dot"
    if branches:
        return f"{len(branches)} branch(es) are not closed"
    if rings:
        return f"ring {min(rings)} is opened but not closed"
    return None
