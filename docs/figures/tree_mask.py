"""Draws the README's figure: a draft tree and its attention mask, both read off one parent array.

python docs/figures/tree_mask.py > docs/figures/tree_mask.svg
"""

import sys

from treepass.attention import forest_visibility
from treepass.tree import DraftTree, Forest

CONTEXT = ("The", "old")
WORDS = ("cat", "sat", "is", "ran", "on", "there", "the", "mat", "rug")
PARENTS = (-1, 0, 0, 0, 1, 2, 4, 6, 6)
ACCEPTED = (1, 4, 6, 8)
INK, SOFT, GREEN, ORANGE, BLUE = "#1f2328", "#8c959f", "#009e73", "#d55e00", "#56b4e9"
COLUMN, LINE, CELL, TREE_WIDTH, TOP = 92, 46, 27, 500, 74


def main() -> None:
    """Writes the SVG to stdout."""
    tree = DraftTree.from_parents(range(len(WORDS)), PARENTS)
    rows = _tree_rows(tree)
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 400" font-family="Helvetica, Arial, sans-serif">',
        '<rect width="960" height="400" fill="#ffffff"/>',
        _text(24, 30, "A draft tree below “The old cat”", 16, INK, "start", "bold"),
        _text(TREE_WIDTH + 70, 30, "The mask of its one pass", 16, INK, "start", "bold"),
        *_edges(tree, rows),
        *_nodes(tree, rows),
        *_mask(tree),
        _text(24, 372, "green: the path that the target chose; blue: the bonus after its leaf", 13, SOFT, "start"),
        _text(TREE_WIDTH + 70, 372, "a row sees the context, its ancestors and itself", 13, SOFT, "start"),
        "</svg>",
    ]
    sys.stdout.write("\n".join(parts) + "\n")


def _tree_rows(tree: DraftTree) -> list[float]:
    """Height of each node: leaves stand below each other, a parent stands amid its children."""
    heights = [0.0] * tree.rows
    leaves = iter(range(tree.rows))

    def place(node: int) -> float:
        children = list(tree.children(node).values())
        heights[node] = sum(map(place, children)) / len(children) if children else float(next(leaves))
        return heights[node]

    place(0)
    return heights


def _xy(tree: DraftTree, rows: list[float], node: int) -> tuple[float, float]:
    return 60 + COLUMN * float(tree.depths[node]), TOP + 36 + 1.4 * LINE * rows[node]


def _edges(tree: DraftTree, rows: list[float]) -> list[str]:
    edges = []
    for node in range(1, tree.rows):
        (x1, y1), (x2, y2) = _xy(tree, rows, int(tree.parents[node])), _xy(tree, rows, node)
        taken = node in ACCEPTED
        style = f'stroke="{GREEN if taken else "#d0d7de"}" stroke-width="{3 if taken else 1.5}"'
        edges.append(f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" {style}/>')
    x, y = _xy(tree, rows, ACCEPTED[-1])
    edges.append(f'<line x1="{x}" y1="{y}" x2="{x + COLUMN}" y2="{y}" stroke="{BLUE}" stroke-dasharray="5 4"/>')
    return edges


def _nodes(tree: DraftTree, rows: list[float]) -> list[str]:
    nodes = []
    for node, word in enumerate(WORDS):
        colour = INK if node == 0 else GREEN if node in ACCEPTED else SOFT
        nodes += _pill(*_xy(tree, rows, node), word, colour, dashed=False)
    x, y = _xy(tree, rows, ACCEPTED[-1])
    return nodes + _pill(x + COLUMN, y, "today", BLUE, dashed=True)


def _pill(x: float, y: float, word: str, colour: str, *, dashed: bool) -> list[str]:
    dash = ' stroke-dasharray="4 3"' if dashed else ""
    box = f'<rect x="{x - 30}" y="{y - 15}" width="60" height="30" rx="15" fill="#ffffff" stroke="{colour}"'
    return [f'{box} stroke-width="2"{dash}/>', _text(x, y + 5, word, 14, colour, "middle")]


def _mask(tree: DraftTree) -> list[str]:
    visible = forest_visibility(Forest((tree,), (len(CONTEXT),))).tolist()
    left, top = TREE_WIDTH + 120, TOP + 20
    cells = []
    for row, seen in enumerate(visible):
        cells.append(_text(left - 8, top + CELL * row + 18, WORDS[row], 13, INK, "end"))
        for key, on in enumerate(seen):
            itself = key == row + len(CONTEXT)
            fill = "#f0f3f6" if not on else ORANGE if itself else "#c9b79c" if key < len(CONTEXT) else "#e8a87c"
            where = f'x="{left + CELL * key}" y="{top + CELL * row}" width="{CELL - 2}" height="{CELL - 2}"'
            cells.append(f'<rect {where} rx="3" fill="{fill}"/>')
    for key, word in enumerate((*CONTEXT, *WORDS)):
        x = left + CELL * key + 12
        turned = f'transform="translate({x + 4} {top - 6}) rotate(-50)"'
        cells.append(f"<g {turned}>{_text(0, 0, word, 12, INK, 'start')}</g>")
    return cells


def _text(x: float, y: float, content: str, size: int, colour: str, anchor: str, weight: str = "normal") -> str:
    style = f'font-size="{size}" fill="{colour}" text-anchor="{anchor}" font-weight="{weight}"'
    return f'<text x="{x}" y="{y}" {style}>{content}</text>'


if __name__ == "__main__":
    main()
