"""Small functions of the kind that exercises ask for. Only their text is read: whole, or without the body."""

from __future__ import annotations

import math
from collections import Counter


def shorten(text: str, limit: int) -> str:
    """Cut the text to at most limit characters, and put three dots in place of what is gone.

    >>> shorten("a long sentence", 9)
    'a long...'
    >>> shorten("short", 9)
    'short'
    """
    if len(text) <= limit:
        return text
    return text[: max(0, limit - 3)] + "..."


def gaps(numbers: list[int]) -> list[int]:
    """Return the differences between neighbours.

    >>> gaps([1, 4, 9])
    [3, 5]
    >>> gaps([7])
    []
    """
    return [second - first for first, second in zip(numbers, numbers[1:], strict=False)]


def is_leap(year: int) -> bool:
    """
    Is the year a leap year in the Gregorian calendar?
    is_leap(2000) == True
    is_leap(1900) == False
    """
    if year % 400 == 0:
        return True
    return year % 4 == 0 and year % 100 != 0


def longest_streak(days):
    """Given a list of booleans, one a day, return the length of the longest run of True.

    For example, longest_streak([True, True, False, True]) is 2.
    """
    best = current = 0
    for day in days:
        current = current + 1 if day else 0
        best = max(best, current)
    return best


def initials(name: str) -> str:
    """Return the initials of a name in capitals, each with a dot.

    >>> initials("ada king lovelace")
    'A.K.L.'
    """
    return "".join(part[0].upper() + "." for part in name.split())


def chunks(items: list, size: int) -> list[list]:
    """Split the items into lists of the given size; the last may be shorter.

    >>> chunks([1, 2, 3, 4, 5], 2)
    [[1, 2], [3, 4], [5]]
    """
    result = []
    for start in range(0, len(items), size):
        result.append(items[start : start + size])
    return result


def digital_root(number: int) -> int:
    """Add up the digits of the number, then those of the sum, until one digit is left.

    >>> digital_root(493193)
    2
    """
    while number > 9:
        number = sum(int(digit) for digit in str(number))
    return number


def transpose(rows):
    """
    Turn a list of rows into a list of columns. All rows have the same length.
    transpose([[1, 2, 3], [4, 5, 6]]) ==> [[1, 4], [2, 5], [3, 6]]
    """
    if not rows:
        return []
    columns = []
    for index in range(len(rows[0])):
        columns.append([row[index] for row in rows])
    return columns


def caesar(text: str, shift: int) -> str:
    """Shift every letter of the text by so many places in the alphabet; leave other characters alone.

    >>> caesar("Hello, Zoe!", 1)
    'Ifmmp, Apf!'
    """
    result = []
    for char in text:
        if char.isalpha():
            base = ord("A") if char.isupper() else ord("a")
            result.append(chr((ord(char) - base + shift) % 26 + base))
        else:
            result.append(char)
    return "".join(result)


def second_largest(numbers: list[float]) -> float | None:
    """Return the second largest distinct number, or None if there is none.

    >>> second_largest([4, 9, 9, 2])
    4
    >>> second_largest([3, 3])
    """
    distinct = sorted(set(numbers))
    if len(distinct) < 2:
        return None
    return distinct[-2]


def compress(text: str) -> str:
    """Write each run of equal characters as the character and its length.

    >>> compress("aaabcc")
    'a3b1c2'
    """
    result = ""
    index = 0
    while index < len(text):
        end = index
        while end < len(text) and text[end] == text[index]:
            end += 1
        result += text[index] + str(end - index)
        index = end
    return result


def balanced(text: str) -> bool:
    """Check that every bracket of the kinds (), [] and {} is closed by one of its kind, in the right order.

    >>> balanced("a(b[c]{d})")
    True
    >>> balanced("(]")
    False
    """
    closing = {")": "(", "]": "[", "}": "{"}
    open_ones = []
    for char in text:
        if char in closing.values():
            open_ones.append(char)
        elif char in closing:
            if not open_ones or open_ones.pop() != closing[char]:
                return False
    return not open_ones


def moving_average(values, width):
    """Return the average of every window of the given width.

    moving_average([1, 2, 3, 4], 2) gives [1.5, 2.5, 3.5].
    If the list is shorter than the window, return an empty list.
    """
    averages = []
    for start in range(len(values) - width + 1):
        window = values[start : start + width]
        averages.append(sum(window) / width)
    return averages


def common_prefix(words: list[str]) -> str:
    """Return the longest beginning that all words share.

    >>> common_prefix(["inter", "internet", "interval"])
    'inter'
    >>> common_prefix(["dog", "cat"])
    ''
    """
    if not words:
        return ""
    shortest = min(words, key=len)
    for index, char in enumerate(shortest):
        if any(word[index] != char for word in words):
            return shortest[:index]
    return shortest


def word_lengths(sentence: str) -> dict[str, int]:
    """Map each word of the sentence, in small letters, to its length.

    >>> word_lengths("The quick fox")
    {'the': 3, 'quick': 5, 'fox': 3}
    """
    return {word: len(word) for word in sentence.lower().split()}


def to_binary(number: int) -> str:
    """Return the binary digits of a whole number that is not negative, without bin().

    >>> to_binary(10)
    '1010'
    >>> to_binary(0)
    '0'
    """
    if number == 0:
        return "0"
    digits = []
    while number:
        digits.append(str(number % 2))
        number //= 2
    return "".join(reversed(digits))


def merge_sorted(first: list[int], second: list[int]) -> list[int]:
    """Merge two lists in ascending order into one.

    >>> merge_sorted([1, 5], [2, 3, 9])
    [1, 2, 3, 5, 9]
    """
    merged = []
    i = j = 0
    while i < len(first) and j < len(second):
        if first[i] <= second[j]:
            merged.append(first[i])
            i += 1
        else:
            merged.append(second[j])
            j += 1
    return merged + first[i:] + second[j:]


def clock_angle(hour: int, minute: int) -> float:
    """
    Return the smaller angle, in degrees, between the hands of a clock.
    clock_angle(3, 0) == 90.0
    clock_angle(12, 30) == 165.0
    """
    angle = abs(30 * (hour % 12) + 0.5 * minute - 6 * minute)
    return min(angle, 360 - angle)


def most_frequent(items: list[str]) -> str:
    """Return the item that occurs most often; of several, the one that comes first in the alphabet.

    >>> most_frequent(["b", "a", "b", "a", "c"])
    'a'
    """
    counts = Counter(items)
    top = max(counts.values())
    return min(item for item, count in counts.items() if count == top)


def snake_case(name: str) -> str:
    """Turn a name in CamelCase into snake_case.

    >>> snake_case("FileNameLength")
    'file_name_length'
    """
    result = ""
    for index, char in enumerate(name):
        if char.isupper() and index > 0:
            result += "_"
        result += char.lower()
    return result


def divisors(number: int) -> list[int]:
    """Return all divisors of a positive number in ascending order.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small, large = [], []
    for candidate in range(1, math.isqrt(number) + 1):
        if number % candidate == 0:
            small.append(candidate)
            if candidate != number // candidate:
                large.append(number // candidate)
    return small + large[::-1]


def zigzag(numbers):
    """Reorder the numbers: smallest, largest, second smallest, second largest, and so on.

    Examples:
    zigzag([3, 1, 2]) == [1, 3, 2]
    zigzag([]) == []
    """
    ordered = sorted(numbers)
    result = []
    while ordered:
        result.append(ordered.pop(0))
        if ordered:
            result.append(ordered.pop())
    return result


def count_islands(grid: list[str]) -> int:
    """Count the groups of '#' in the grid; cells that touch at a side belong to one group.

    >>> count_islands(["##.", "..#"])
    2
    """
    seen = set()
    islands = 0
    for y, row in enumerate(grid):
        for x, cell in enumerate(row):
            if cell != "#" or (y, x) in seen:
                continue
            islands += 1
            todo = [(y, x)]
            while todo:
                a, b = todo.pop()
                if (a, b) in seen or not (0 <= a < len(grid) and 0 <= b < len(grid[a])) or grid[a][b] != "#":
                    continue
                seen.add((a, b))
                todo += [(a + 1, b), (a - 1, b), (a, b + 1), (a, b - 1)]
    return islands


def change(amount: int, coins: list[int]) -> list[int]:
    """Pay the amount with the largest coins first. Return the coins used, or [] if it cannot be paid so.

    >>> change(30, [25, 10, 5, 1])
    [25, 5]
    """
    used = []
    for coin in sorted(coins, reverse=True):
        while amount >= coin:
            used.append(coin)
            amount -= coin
    return used if amount == 0 else []


def vowel_share(text: str) -> float:
    """Return the share of vowels among the letters of the text, from 0 to 1; 0 if there are no letters.

    >>> vowel_share("Idea 42")
    0.75
    """
    letters = [char for char in text.lower() if char.isalpha()]
    if not letters:
        return 0.0
    return sum(char in "aeiou" for char in letters) / len(letters)


def rotate(items: list[int], steps: int) -> list[int]:
    """Move every item to the right by so many steps; those that fall off come back at the left.

    >>> rotate([1, 2, 3, 4], 1)
    [4, 1, 2, 3]
    """
    if not items:
        return []
    steps %= len(items)
    return items[-steps:] + items[:-steps] if steps else list(items)


def parse_duration(text: str) -> int:
    """Read a duration such as "2h 15m 5s" and return it in seconds.

    >>> parse_duration("1h 1m")
    3660
    """
    seconds = {"h": 3600, "m": 60, "s": 1}
    total = 0
    for part in text.split():
        total += int(part[:-1]) * seconds[part[-1]]
    return total


def pairs_with_sum(numbers: list[int], target: int) -> list[tuple[int, int]]:
    """Return all pairs (a, b) with a <= b from different places of the list whose sum is target, without repeats.

    >>> pairs_with_sum([1, 5, 3, 3, 1], 6)
    [(1, 5), (3, 3)]
    """
    found = set()
    seen = set()
    for number in numbers:
        if target - number in seen:
            found.add((min(number, target - number), max(number, target - number)))
        seen.add(number)
    return sorted(found)


def collatz(start: int) -> list[int]:
    """Return the sequence from start to 1 in which an even n is followed by n / 2 and an odd one by 3n + 1.

    >>> collatz(6)
    [6, 3, 10, 5, 16, 8, 4, 2, 1]
    """
    sequence = [start]
    while sequence[-1] != 1:
        last = sequence[-1]
        sequence.append(last // 2 if last % 2 == 0 else 3 * last + 1)
    return sequence


def grade(points, limits=(50, 65, 80, 90)):
    """Return a letter from "F" to "A" for a number of points.

    Below the first limit it is "F"; each limit reached is one letter better: "D", "C", "B", "A".
    """
    letters = "FDCBA"
    reached = 0
    for limit in limits:
        if points >= limit:
            reached += 1
    return letters[reached]


def is_pangram(text: str) -> bool:
    """Does the text use each of the 26 letters at least once?

    >>> is_pangram("Pack my box with five dozen liquor jugs.")
    True
    """
    letters = {char for char in text.lower() if "a" <= char <= "z"}
    return len(letters) == 26


def triangle_kind(a: float, b: float, c: float) -> str:
    """Return "equilateral", "isosceles", "scalene", or "none" if no triangle has these sides.

    >>> triangle_kind(3, 3, 5)
    'isosceles'
    >>> triangle_kind(1, 2, 9)
    'none'
    """
    if a + b <= c or a + c <= b or b + c <= a:
        return "none"
    if a == b == c:
        return "equilateral"
    if a == b or b == c or a == c:
        return "isosceles"
    return "scalene"


def flatten(nested):
    """Return the items of lists within lists, however deep, as one flat list.

    flatten([1, [2, [3, []]], 4]) is [1, 2, 3, 4].
    """
    flat = []
    for item in nested:
        if isinstance(item, list):
            flat.extend(flatten(item))
        else:
            flat.append(item)
    return flat


def group_by_length(words: list[str]) -> dict[int, list[str]]:
    """Collect the words by their length, each group in alphabetical order.

    >>> group_by_length(["to", "be", "not"])
    {2: ['be', 'to'], 3: ['not']}
    """
    groups: dict[int, list[str]] = {}
    for word in words:
        groups.setdefault(len(word), []).append(word)
    return {length: sorted(group) for length, group in sorted(groups.items())}


def censor(text: str, banned: list[str]) -> str:
    """Replace every banned word by stars of the same number, whatever its case.

    >>> censor("Darn this darn rain", ["darn"])
    '**** this **** rain'
    """
    words = text.split(" ")
    for index, word in enumerate(words):
        if word.lower() in banned:
            words[index] = "*" * len(word)
    return " ".join(words)


def power_set(items: list[int]) -> list[list[int]]:
    """Return all subsets of the items, the empty one first.

    >>> power_set([1, 2])
    [[], [1], [2], [1, 2]]
    """
    subsets: list[list[int]] = [[]]
    for item in items:
        subsets += [[*subset, item] for subset in subsets]
    return subsets


def overlap(first: tuple[int, int], second: tuple[int, int]) -> int:
    """Return how many whole numbers two closed ranges share.

    >>> overlap((1, 5), (4, 9))
    2
    >>> overlap((1, 2), (5, 6))
    0
    """
    start = max(first[0], second[0])
    end = min(first[1], second[1])
    return max(0, end - start + 1)


def running_total(amounts):
    """
    Return a list in which each entry is the sum of all amounts up to that place.
    running_total([5, -2, 4]) == [5, 3, 7]
    """
    total = 0
    totals = []
    for amount in amounts:
        total += amount
        totals.append(total)
    return totals


def knight_moves(square: str) -> list[str]:
    """Return the squares that a knight on the given square of a chess board can reach, in alphabetical order.

    >>> knight_moves("a1")
    ['b3', 'c2']
    """
    column, row = ord(square[0]) - ord("a"), int(square[1]) - 1
    reached = []
    for across, up in ((1, 2), (2, 1), (2, -1), (1, -2), (-1, -2), (-2, -1), (-2, 1), (-1, 2)):
        x, y = column + across, row + up
        if 0 <= x < 8 and 0 <= y < 8:
            reached.append(chr(x + ord("a")) + str(y + 1))
    return sorted(reached)


def sort_by_last_letter(words: list[str]) -> list[str]:
    """Sort the words by their last letter; words with the same last letter keep their order.

    >>> sort_by_last_letter(["pear", "fig", "plum", "tiger"])
    ['fig', 'plum', 'pear', 'tiger']
    """
    return sorted(words, key=lambda word: word[-1])


def next_prime(number: int) -> int:
    """Return the smallest prime that is larger than the number.

    >>> next_prime(13)
    17
    """
    candidate = max(2, number + 1)
    while any(candidate % divisor == 0 for divisor in range(2, math.isqrt(candidate) + 1)):
        candidate += 1
    return candidate


def mask_card(number: str) -> str:
    """Hide all digits of a card number but the last four, and leave spaces as they are.

    >>> mask_card("1234 5678 9012")
    '**** **** 9012'
    """
    digits_left = sum(char.isdigit() for char in number)
    masked = ""
    for char in number:
        if char.isdigit():
            masked += char if digits_left <= 4 else "*"
            digits_left -= 1
        else:
            masked += char
    return masked
