"""Integer polynomials in the symbols of a step's shapes: exact bytes as a function of sizes.

Symbols: T tokens of the micro-batch, S its longest sequence, Q query rows of an attention block, L rows the loss is computed of,
C rows of a loss chunk, h hidden, q query width, k key/value width, f MLP width, n heads, m key/value heads, g = n / m,
d head size, V vocabulary, r adapter rank, W elements of a quantised weight brought back at once.
"""

from collections.abc import Mapping

Monomial = str  # "T*h", sorted; "" is 1
Poly = dict[Monomial, float]


_WHOLE = {("d", "n"): "q", ("d", "m"): "k", ("g", "m"): "n", ("B", "S"): "T"}


def _word(symbols: list[str]) -> Monomial:
    """The sorted product, with heads times head size written as a width."""
    for parts, whole in _WHOLE.items():
        if all(part in symbols for part in parts):
            for part in parts:
                symbols.remove(part)
            symbols.append(whole)
    return "*".join(sorted(symbols))


def times(a: Poly, b: Poly) -> Poly:
    out: Poly = {}
    for x, cx in a.items():
        for y, cy in b.items():
            word = _word([symbol for symbol in (*x.split("*"), *y.split("*")) if symbol])
            out[word] = out.get(word, 0) + cx * cy
    return out


def plus(a: Mapping[Monomial, float], b: Mapping[Monomial, float], sign: int = 1) -> Poly:
    """``a + sign·b`` without zero terms."""
    out = dict(a)
    for word, c in b.items():
        out[word] = out.get(word, 0) + sign * c
        if abs(out[word]) < 1e-9:
            del out[word]
    return out


def value(poly: Mapping[Monomial, float], sizes: Mapping[str, float]) -> int:
    """The polynomial at ``sizes``, to the byte."""
    total = 0.0
    for word, c in poly.items():
        for symbol in word.split("*") if word else ():
            c *= sizes[symbol]
        total += c
    return round(total)


# Each symbol is at least those after it in the same chain, whatever the model and the batch.
_CHAINS = ("TSQ", "TLC", "fhr", "qkd", "qnm", "qng", "Vhr")


def _at_least(a: str, b: str) -> bool:
    return a == b or any(a in chain and b in chain and chain.index(a) < chain.index(b) for chain in _CHAINS)


def _covers(big: Monomial, small: Monomial) -> bool:
    """True if ``big ≥ small`` for all sizes: every factor of ``small`` has its own factor of ``big`` above it."""
    left = big.split("*") if big else []
    for factor in small.split("*") if small else ():
        above = [i for i, symbol in enumerate(left) if _at_least(symbol, factor)]
        if not above:
            return False
        left.pop(above[-1] if left[above[-1]] == factor else above[0])
    return True


def dominates(a: Mapping[Monomial, float], b: Mapping[Monomial, float]) -> bool:
    """True if ``a ≥ b`` is certain for all sizes: every missing term is covered by a surplus of larger ones."""
    rest = plus(a, b, -1)
    surplus = {word: c for word, c in rest.items() if c > 0}
    for word, c in rest.items():
        if c > 0:
            continue
        for big in surplus:
            if c < 0 and _covers(big, word):
                used = min(surplus[big], -c)
                surplus[big] -= used
                c += used
        if c < -1e-9:
            return False
    return True
