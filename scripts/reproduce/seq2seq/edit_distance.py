"""The edit distance between two texts, of which the character error rate is made."""


def edit_distance(first: str, second: str) -> int:
    """The fewest characters to insert, delete or replace between two strings (Levenshtein)."""
    row = list(range(len(second) + 1))
    for place, character in enumerate(first, start=1):
        diagonal, row[0] = row[0], place
        for column, other in enumerate(second, start=1):
            changed = diagonal + (character != other)
            diagonal, row[column] = row[column], min(row[column] + 1, row[column - 1] + 1, changed)
    return row[-1]
