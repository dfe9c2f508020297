"""docs/pictures.md has the table of keys that the collator goes by."""

from pathlib import Path

from fa2patch.documents.names import JOINS, KEYS

PAGE = Path(__file__).parents[2] / "docs" / "pictures.md"
BEGIN, END = "<!-- keys:begin -->\n", "<!-- keys:end -->"


def table():
    rows = ["| key | if the example has | of | shape and meaning | joined |", "| --- | --- | --- | --- | --- |"]
    for key in KEYS:
        beside = f"`{key.beside}`" if key.beside else ""
        rows.append(f"| `{key.name}` | {beside} | {key.of} | {key.meaning} | {key.join} |")
    rows += ["", "| joined | how |", "| --- | --- |", *(f"| {name} | {how} |" for name, how in JOINS.items())]
    return "\n".join(rows) + "\n"


def test_the_page_has_the_table_of_the_code():
    """If this fails after a change of the table, write what it expects between the page's two marks."""
    page = PAGE.read_text(encoding="utf-8")
    assert page.partition(BEGIN)[2].partition(END)[0] == table()


def test_every_row_of_the_table_can_be_met():
    seen = set()
    for key in KEYS:
        assert key.join in JOINS and key.of in ("picture", "film", "sound") and key.meaning
        assert (key.name, key.beside) not in seen and (key.name, "") not in seen, key.name
        seen.add((key.name, key.beside))
