# ruff: noqa: B905, RUF007, UP006, UP035, UP045
"""Small functions that the embedded target learns to complete: the docstring is the task, the body is the answer.

The comment above a function is what the model thinks first.  `python -m doctest config/lessons/functions.py` runs the
examples.  Written for this project, without the newest idioms, as such models
see code; nothing here is taken from a benchmark.
"""

from typing import Dict, List, Optional, Tuple


# To convert I multiply by nine fifths and add 32. A single return statement is enough.
def celsius_to_fahrenheit(celsius: float) -> float:
    """Convert a temperature from degrees Celsius to degrees Fahrenheit.
    >>> celsius_to_fahrenheit(100)
    212.0
    >>> celsius_to_fahrenheit(0)
    32.0
    """
    return celsius * 9 / 5 + 32


# I split the text at white space and keep the words that are long enough. The count is the length of that list.
def count_long_words(text: str, length: int) -> int:
    """Count the words of text that have at least length letters.
    >>> count_long_words('the quick brown fox', 4)
    2
    """
    return len([word for word in text.split() if len(word) >= length])


# I keep a running total and append it after each number.
def running_totals(numbers: List[int]) -> List[int]:
    """Return a list in which each element is the sum of all numbers up to that position.
    >>> running_totals([1, 2, 3])
    [1, 3, 6]
    >>> running_totals([])
    []
    """
    totals = []
    total = 0
    for number in numbers:
        total += number
        totals.append(total)
    return totals


# Two words are anagrams if they have the same letters. Sorting both and comparing them is simple.
def are_anagrams(first: str, second: str) -> bool:
    """
    Check whether two words are anagrams of each other. Upper and lower case do not matter.
    >>> are_anagrams('Listen', 'Silent')
    True
    >>> are_anagrams('apple', 'pear')
    False
    """
    return sorted(first.lower()) == sorted(second.lower())


# I walk over the list and compare each number with the one before it. A rise is when the later one is larger.
def count_rises(temperatures: list):
    """
    You are given the temperatures of successive days. Return how often a day was warmer than the day before.

    >>> count_rises([12, 14, 13, 15])
    2
    >>> count_rises([20])
    0
    """
    rises = 0
    for before, after in zip(temperatures, temperatures[1:]):
        if after > before:
            rises += 1
    return rises


# A dictionary can hold the counts. For each word I add one to its entry.
def word_counts(text: str) -> Dict[str, int]:
    """Return a dictionary that maps each word of the text to the number of times it occurs.
    >>> word_counts('a b a')
    {'a': 2, 'b': 1}
    """
    counts = {}
    for word in text.split():
        counts[word] = counts.get(word, 0) + 1
    return counts


# The price after the discount is the price times one minus the rate. I round it to two digits.
def discounted_price(price: float, percent: float) -> float:
    """Return the price after a discount of the given percent, rounded to two decimals.
    >>> discounted_price(80.0, 25)
    60.0
    """
    return round(price * (1 - percent / 100), 2)


# I check each character with isdigit and add its value when it is a digit.
def sum_of_digits_in_text(text):
    """
    Add up all the digits that occur in a text. Other characters are ignored.
    >>> sum_of_digits_in_text('a1b2c3')
    6
    >>> sum_of_digits_in_text('none')
    0
    """
    return sum(int(character) for character in text if character.isdigit())


# The list has to be cut into pieces of the given size. A range with a step gives the starting points.
def chunks(items: list, size: int) -> list:
    """Split a list into pieces of the given size. The last piece may be shorter.
    >>> chunks([1, 2, 3, 4, 5], 2)
    [[1, 2], [3, 4], [5]]
    """
    return [items[start : start + size] for start in range(0, len(items), size)]


# A year is a leap year if it divides by 4, except for centuries that do not divide by 400.
def is_leap_year(year: int) -> bool:
    """Return True if the year is a leap year in the Gregorian calendar, else False.
    >>> is_leap_year(2024)
    True
    >>> is_leap_year(1900)
    False
    """
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


# If the list is empty there is no second largest. I remove duplicates, sort, and take the last but one.
def second_largest(numbers: List[int]) -> Optional[int]:
    """Return the second largest distinct number of the list, or None if there is no such number.
    >>> second_largest([4, 9, 9, 7])
    7
    >>> second_largest([5])
    """
    distinct = sorted(set(numbers))
    if len(distinct) < 2:
        return None
    return distinct[-2]


# I start with the first two values and loop. Each new one is the sum of the last two times two.
def doubling_sequence(n: int) -> List[int]:
    """
    The doubling sequence begins with 1 and 1. Each later element is twice the sum of the two elements before it.
    Return the first n elements.
    >>> doubling_sequence(4)
    [1, 1, 4, 10]
    """
    sequence = [1, 1]
    while len(sequence) < n:
        sequence.append(2 * (sequence[-1] + sequence[-2]))
    return sequence[:n]


# Hours and minutes follow from dividing by 60. I format the minutes with two digits.
def format_minutes(minutes: int) -> str:
    """Write a number of minutes as hours and minutes.
    >>> format_minutes(135)
    '2:15'
    >>> format_minutes(59)
    '0:59'
    """
    return f"{minutes // 60}:{minutes % 60:02d}"


# A word belongs in the result if it starts with a capital letter. istitle is too strict, so I look at the first letter.
def capitalized_words(sentence: str) -> List[str]:
    """Return the words of the sentence that begin with a capital letter, in the same order.
    >>> capitalized_words('Anna went to Rome')
    ['Anna', 'Rome']
    """
    return [word for word in sentence.split() if word[0].isupper()]


# I go through the pairs and swap key and value in a new dictionary.
def inverted(mapping: dict) -> dict:
    """Swap the keys and the values of a dictionary. The values are all different.
    >>> inverted({'a': 1, 'b': 2})
    {1: 'a', 2: 'b'}
    """
    return {value: key for key, value in mapping.items()}


# The matrix is a list of rows. zip with a star gives its columns.
def transpose(matrix: List[List[int]]) -> List[List[int]]:
    """Return the transposed matrix: rows become columns.
    >>> transpose([[1, 2, 3], [4, 5, 6]])
    [[1, 4], [2, 5], [3, 6]]
    """
    return [list(column) for column in zip(*matrix)]


# I count how often each grade occurs and return the grade with the highest count. max with a key does this.
def most_common_grade(grades: list):
    """
    Return the grade that occurs most often in the list. If two grades occur equally often, return the one that comes
    first in the list.
    >>> most_common_grade(['B', 'A', 'B', 'C'])
    'B'
    """
    return max(grades, key=grades.count)


# The distance is the square root of the sum of the squared differences.
def distance(a: Tuple[float, float], b: Tuple[float, float]) -> float:
    """Return the distance between two points of the plane.
    >>> distance((0, 0), (3, 4))
    5.0
    """
    return ((a[0] - b[0]) ** 2 + (a[1] - b[1]) ** 2) ** 0.5


# I only need the first letter of each word, in upper case, joined together.
def initials(name: str) -> str:
    """Return the initials of a name in capital letters.
    >>> initials('grace brewster hopper')
    'GBH'
    """
    return "".join(word[0].upper() for word in name.split())


# Each bottle has its deposit. I look up the deposit for each one and add them up.
def deposit(bottles: List[str]) -> float:
    """
    A shop pays 0.25 for each plastic bottle and 0.5 for each glass bottle. Other items pay nothing.
    Given a list with the words 'plastic' and 'glass', return how much the shop pays.
    >>> deposit(['plastic', 'glass', 'can'])
    0.75
    """
    prices = {"plastic": 0.25, "glass": 0.5}
    return sum(prices.get(bottle, 0) for bottle in bottles)


# The characters at the even positions come first, then the others. Slices with a step of two do it.
def unzip_text(text: str) -> str:
    """Put the characters at even positions first, and behind them the characters at odd positions.
    >>> unzip_text('abcdef')
    'acebdf'
    """
    return text[::2] + text[1::2]


# I remember which items I have seen. The first one that I see again is the answer.
def first_repeated(items: list):
    """Return the first item that occurs a second time, or None if all items are different.
    >>> first_repeated([3, 1, 4, 1, 3])
    1
    >>> first_repeated([1, 2])
    """
    seen = set()
    for item in items:
        if item in seen:
            return item
        seen.add(item)
    return None


# The loop runs while the number is more than one. Even numbers are halved, odd ones are decreased, and I count the steps.
def steps_to_one(n):
    """
    You start with a positive integer n. If it is even you divide it by two, if it is odd you subtract one.
    Return the number of steps until it is 1.

    Examples:
    >>> steps_to_one(6)
    3
    >>> steps_to_one(1)
    0
    """
    steps = 0
    while n > 1:
        n = n // 2 if n % 2 == 0 else n - 1
        steps += 1
    return steps


# I multiply matching elements and add up the products.
def dot_product(a: List[float], b: List[float]) -> float:
    """Return the dot product of two vectors of the same length.
    >>> dot_product([1, 2], [3, 4])
    11
    """
    return sum(x * y for x, y in zip(a, b))


# A password needs enough characters, a digit and a capital letter. I test the three conditions with any.
def is_strong_password(password: str) -> bool:
    """
    A password is strong if it has at least 8 characters, at least one digit and at least one capital letter.
    >>> is_strong_password('Secret123')
    True
    >>> is_strong_password('secret')
    False
    """
    if len(password) < 8:
        return False
    has_digit = any(c.isdigit() for c in password)
    has_capital = any(c.isupper() for c in password)
    return has_digit and has_capital


# Clamping means taking the minimum with the upper bound and the maximum with the lower one.
def clamp(value: int, low: int, high: int) -> int:
    """Limit value to the range from low to high.
    >>> clamp(15, 0, 10)
    10
    >>> clamp(-3, 0, 10)
    0
    """
    return max(low, min(value, high))


# I sort by the second element of each pair, from the largest to the smallest, and take the names.
def ranking(scores: List[Tuple[str, int]]) -> List[str]:
    """
    You are given pairs of a player's name and score. Return the names ordered by score, the best player first.
    >>> ranking([('Ann', 3), ('Bob', 7)])
    ['Bob', 'Ann']
    """
    ordered = sorted(scores, key=lambda pair: pair[1], reverse=True)
    return [name for name, score in ordered]


# The elements with an odd value at an even index are added. enumerate gives both the index and the value.
def sum_odd_at_even(values: list):
    """Given a list of integers, return the sum of the odd values that stand at even indices.
    >>> sum_odd_at_even([3, 5, 4, 7, 9])
    12
    """
    return sum(value for index, value in enumerate(values) if index % 2 == 0 and value % 2 == 1)


# All rows and columns have to be added up. A nested sum is enough.
def total_of_table(table: List[List[int]]) -> int:
    """Add up all the numbers of a table that is given as a list of rows.
    >>> total_of_table([[1, 2], [3, 4]])
    10
    """
    return sum(sum(row) for row in table)


# I need the words in reverse order, so I split, reverse and join.
def reverse_words(sentence: str) -> str:
    """Return the sentence with its words in reverse order.
    >>> reverse_words('one two three')
    'three two one'
    """
    return " ".join(reversed(sentence.split()))


# A perfect square has an integer root. I round the root and test by squaring.
def is_square(n: int) -> bool:
    """Check if n is the square of an integer.
    >>> is_square(49)
    True
    >>> is_square(50)
    False
    """
    root = round(n**0.5)
    return root * root == n


# Every third letter is replaced by a star. I build the new text with a join.
def mask_every_third(text: str) -> str:
    """Replace every third character of the text with a star.
    >>> mask_every_third('abcdef')
    'ab*de*'
    """
    return "".join("*" if (i + 1) % 3 == 0 else c for i, c in enumerate(text))


# I compare the lists position by position and count where they agree.
def matching_positions(a: List[int], b: List[int]) -> int:
    """Count the positions at which two lists have the same element.
    >>> matching_positions([1, 2, 3], [1, 5, 3])
    2
    """
    return sum(1 for x, y in zip(a, b) if x == y)


# The water level rises and falls. I track the current level and the highest one so far.
def highest_level(changes: List[int]) -> int:
    """
    A tank is empty at first. You are given the changes of its water level, one after another.
    Return the highest level that the water reaches.

    >>> highest_level([5, -2, 4, -6])
    7
    """
    level = 0
    highest = 0
    for change in changes:
        level += change
        highest = max(highest, level)
    return highest


# Flattening one level: I go through each inner list and collect its elements.
def flatten(lists: List[list]) -> list:
    """Put the elements of several lists into one list.
    >>> flatten([[1, 2], [], [3]])
    [1, 2, 3]
    """
    return [element for inner in lists for element in inner]


# A rectangle overlaps on an axis if each one starts before the other ends. Both axes must overlap.
def intervals_overlap(a: Tuple[int, int], b: Tuple[int, int]) -> bool:
    """
    Each interval is a pair (start, end) with start <= end. Return True if the two closed intervals share a point.
    >>> intervals_overlap((1, 4), (4, 6))
    True
    >>> intervals_overlap((1, 2), (3, 4))
    False
    """
    return a[0] <= b[1] and b[0] <= a[1]


# I only take the lines that are not empty after stripping, and strip them.
def clean_lines(text: str) -> List[str]:
    """Return the lines of the text without surrounding spaces. Empty lines are left out.
    >>> clean_lines(' a \\n\\n b ')
    ['a', 'b']
    """
    return [line.strip() for line in text.splitlines() if line.strip()]


# The factorial grows by multiplying. I collect each product in a list.
def factorials(n: int) -> List[int]:
    """Return the factorials of 1 to n.
    >>> factorials(4)
    [1, 2, 6, 24]
    """
    result = []
    product = 1
    for i in range(1, n + 1):
        product *= i
        result.append(product)
    return result


# Three sides make a triangle if the two shorter ones together are longer than the third. Sorting makes that easy.
def can_be_triangle(a, b, c):
    """
    Given three lengths, return True if they can be the sides of a triangle.
    >>> can_be_triangle(3, 4, 5)
    True
    >>> can_be_triangle(1, 2, 5)
    False
    """
    short, middle, longest = sorted([a, b, c])
    return short + middle > longest


# A caption has a limit. If the text is too long, I cut it and add three dots.
def shorten(text: str, limit: int) -> str:
    """Return the text if it has at most limit characters. Otherwise cut it so that with '...' it has limit characters.
    >>> shorten('hello world', 8)
    'hello...'
    >>> shorten('hi', 8)
    'hi'
    """
    if len(text) <= limit:
        return text
    return text[: limit - 3] + "..."


# I group the words by their first letter. setdefault creates the list when a letter is new.
def group_by_first_letter(words: List[str]) -> Dict[str, List[str]]:
    """Group words by their first letter.
    >>> group_by_first_letter(['apple', 'bear', 'ant'])
    {'a': ['apple', 'ant'], 'b': ['bear']}
    """
    groups = {}
    for word in words:
        groups.setdefault(word[0], []).append(word)
    return groups


# The number of seats is rows times seats in a row, minus the ones that are taken.
def free_seats(rows: int, seats_per_row: int, taken: int) -> int:
    """A cinema has a number of rows with the same number of seats each. Return how many seats are free.
    >>> free_seats(10, 12, 45)
    75
    """
    return rows * seats_per_row - taken


# I try each divisor up to n and keep those that divide it without rest.
def proper_divisors(n: int) -> List[int]:
    """Return all divisors of n that are smaller than n, in ascending order.
    >>> proper_divisors(12)
    [1, 2, 3, 4, 6]
    """
    return [d for d in range(1, n) if n % d == 0]


# The list must be sorted in ascending order. I compare it with the sorted list.
def is_ordered(items: list) -> bool:
    """Return True if the list is in ascending order.
    >>> is_ordered([1, 2, 2, 5])
    True
    >>> is_ordered([3, 1])
    False
    """
    return items == sorted(items)


# The balance changes with each booking. A 'D' adds the amount and a 'W' subtracts it.
def final_balance(bookings: List[str]) -> int:
    """
    Each booking is a text such as 'D 100' for a deposit or 'W 30' for a withdrawal. The account is empty at first.
    Return the balance after all bookings.
    >>> final_balance(['D 100', 'W 30'])
    70
    """
    balance = 0
    for booking in bookings:
        kind, amount = booking.split()
        if kind == "D":
            balance += int(amount)
        else:
            balance -= int(amount)
    return balance


# I pick the longer of the two and compare lengths.
def more_words(a: str, b: str) -> str:
    """Return the text that has more words. If both have the same number of words, return the first.
    >>> more_words('one two', 'one')
    'one two'
    """
    return a if len(a.split()) >= len(b.split()) else b


# Only the positive numbers count. If there is none the average is zero.
def average_of_positive(numbers: List[float]) -> float:
    """Return the average of the positive numbers in the list, or 0 if there is none.
    >>> average_of_positive([2, -5, 4])
    3.0
    >>> average_of_positive([-1])
    0
    """
    positive = [number for number in numbers if number > 0]
    if not positive:
        return 0
    return sum(positive) / len(positive)


# I repeat each letter as often as its position says, starting at one.
def stretch(word: str) -> str:
    """Repeat the first letter once, the second letter twice, and so on.
    >>> stretch('abc')
    'abbccc'
    """
    return "".join(letter * (i + 1) for i, letter in enumerate(word))


# Binary search halves the range each time. I return the position or -1.
def binary_search(items: List[int], wanted: int) -> int:
    """Return the position of wanted in the sorted list, or -1 if it is not there.
    >>> binary_search([2, 5, 8, 12], 8)
    2
    >>> binary_search([2, 5], 3)
    -1
    """
    low, high = 0, len(items) - 1
    while low <= high:
        middle = (low + high) // 2
        if items[middle] == wanted:
            return middle
        if items[middle] < wanted:
            low = middle + 1
        else:
            high = middle - 1
    return -1


# A robot moves in four directions. I map each letter to a step and add the steps.
def robot_position(moves: str):
    """
    A robot stands at (0, 0). The letters of moves tell it to go one step: 'U' up, 'D' down, 'L' left, 'R' right.
    Return its final position as a tuple (x, y).
    >>> robot_position('UUR')
    (1, 2)
    """
    x = moves.count("R") - moves.count("L")
    y = moves.count("U") - moves.count("D")
    return (x, y)


# The missing number is the difference between the expected sum and the real one.
def missing_number(numbers: List[int], n: int) -> int:
    """The list holds all numbers from 1 to n except for one. Return the number that is missing.
    >>> missing_number([1, 2, 4, 5], 5)
    3
    """
    return n * (n + 1) // 2 - sum(numbers)


# I split at the commas, convert each part to an integer and add them.
def add_csv(line: str) -> int:
    """Add the integers of a line in which they are separated by commas.
    >>> add_csv('3,5,12')
    20
    """
    return sum(int(part) for part in line.split(","))


# The rotation moves the last k elements to the front. I use slices and the remainder.
def rotated(items: list, k: int) -> list:
    """Rotate a list to the right by k places.
    >>> rotated([1, 2, 3, 4], 1)
    [4, 1, 2, 3]
    """
    if not items:
        return []
    k %= len(items)
    return items[-k:] + items[:-k]


# Elements that are in one list but not in the other. The sets' difference in both directions, sorted.
def only_in_one(a: list, b: list) -> list:
    """Return the sorted elements that occur in exactly one of the two lists.
    >>> only_in_one([1, 2, 3], [3, 4])
    [1, 2, 4]
    """
    return sorted(set(a) ^ set(b))


# A hexadecimal colour has two digits for each part. int with base 16 reads them.
def hex_to_rgb(color: str) -> Tuple[int, int, int]:
    """Convert a colour such as '#ff8000' to its red, green and blue parts.
    >>> hex_to_rgb('#ff8000')
    (255, 128, 0)
    """
    return (int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16))


# I need a table of the letter grades and return the first whose limit is reached.
def letter_grade(points: int) -> str:
    """
    Convert points to a grade:
        90 or more: 'A'
        80 or more: 'B'
        70 or more: 'C'
        otherwise: 'F'
    >>> letter_grade(85)
    'B'
    """
    if points >= 90:
        return "A"
    if points >= 80:
        return "B"
    if points >= 70:
        return "C"
    return "F"


# The middle letters depend on whether the length is even or odd. I handle both with integer division.
def middle_letters(word: str) -> str:
    """Return the middle letter of a word, or the two middle letters if its length is even.
    >>> middle_letters('house')
    'u'
    >>> middle_letters('tree')
    're'
    """
    half = len(word) // 2
    if len(word) % 2 == 1:
        return word[half]
    return word[half - 1 : half + 1]


# I keep the value if it is in the allowed range, and filter out the others.
def within(values: List[float], low: float, high: float) -> List[float]:
    """Keep only the values that are at least low and at most high.
    >>> within([1.0, 5.5, 9.0], 2.0, 6.0)
    [5.5]
    """
    return [value for value in values if low <= value <= high]


# Compound interest multiplies the amount by one plus the rate every year.
def savings(amount: float, rate: float, years: int) -> float:
    """Return the amount after some years with compound interest, rounded to two decimals. The rate is in percent.
    >>> savings(1000, 5, 2)
    1102.5
    """
    return round(amount * (1 + rate / 100) ** years, 2)


# Merging two dictionaries while adding the values of shared keys. I copy the first and update it.
def merge_counts(a: Dict[str, int], b: Dict[str, int]) -> Dict[str, int]:
    """Merge two dictionaries of counts. The counts of a key that is in both are added.
    >>> merge_counts({'x': 1}, {'x': 2, 'y': 3})
    {'x': 3, 'y': 3}
    """
    merged = dict(a)
    for key, count in b.items():
        merged[key] = merged.get(key, 0) + count
    return merged


# The key is to compare neighbours: I only keep an item if it differs from the last one that I kept.
def without_repeats(items: list) -> list:
    """Remove items that are equal to the item directly before them.
    >>> without_repeats([1, 1, 2, 2, 1])
    [1, 2, 1]
    """
    result = []
    for item in items:
        if not result or result[-1] != item:
            result.append(item)
    return result


# The cost depends on the weight class. Two thresholds give three prices.
def postage(weight: int) -> float:
    """
    A letter of up to 20 grams costs 1.0, of up to 100 grams 2.0, and a heavier one 3.5.
    Return the postage for the weight in grams.
    >>> postage(50)
    2.0
    """
    if weight <= 20:
        return 1.0
    if weight <= 100:
        return 2.0
    return 3.5


# I count the letters of the alphabet that occur. If all 26 do, it is a pangram.
def is_pangram(sentence: str) -> bool:
    """Check whether the sentence contains every letter of the English alphabet.
    >>> is_pangram('The quick brown fox jumps over the lazy dog')
    True
    >>> is_pangram('Hello')
    False
    """
    letters = {c for c in sentence.lower() if "a" <= c <= "z"}
    return len(letters) == 26


# The product of all numbers starts at one and is multiplied in a loop. Zeros are skipped.
def product_without_zeros(numbers):
    """Multiply all the numbers of a list but skip zeros. The product of no numbers is 1.
    >>> product_without_zeros([2, 0, 5])
    10
    """
    product = 1
    for number in numbers:
        if number != 0:
            product *= number
    return product


# I sort by length first and by the alphabet for words of the same length, so the key is a pair.
def sort_by_length(words: List[str]) -> List[str]:
    """
    Sort words by their length. Words of the same length are sorted alphabetically.
    >>> sort_by_length(['pear', 'fig', 'apple', 'kiwi'])
    ['fig', 'kiwi', 'pear', 'apple']
    """
    return sorted(words, key=lambda word: (len(word), word))


# I look for the largest gap between neighbours after sorting the list.
def largest_gap(numbers: List[int]) -> int:
    """Sort the numbers and return the largest difference between two neighbours. With fewer than two numbers return 0.
    >>> largest_gap([10, 3, 5])
    5
    """
    if len(numbers) < 2:
        return 0
    ordered = sorted(numbers)
    return max(b - a for a, b in zip(ordered, ordered[1:]))


# Snake case becomes camel case when all words but the first get a capital letter.
def to_camel_case(name: str) -> str:
    """Convert a name such as 'max_file_size' to 'maxFileSize'.
    >>> to_camel_case('max_file_size')
    'maxFileSize'
    """
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


# A digit is rare if it does not occur in the number. I check the digits 0 to 9 against the text of the number.
def unused_digits(number: int) -> List[int]:
    """Return the digits from 0 to 9 that do not occur in the number.
    >>> unused_digits(1234567)
    [0, 8, 9]
    """
    return [digit for digit in range(10) if str(digit) not in str(number)]


# The stock falls with each order. An order that is too large is refused, and I count those.
def refused_orders(stock: int, orders: List[int]) -> int:
    """
    A shop has some pieces in stock. Orders arrive one after another. An order for more pieces than are left is refused,
    any other order reduces the stock. Return the number of refused orders.
    >>> refused_orders(10, [4, 7, 6])
    1
    """
    refused = 0
    for order in orders:
        if order > stock:
            refused += 1
        else:
            stock -= order
    return refused


# I use a nested loop over the indices and test each pair once.
def pairs_with_difference(numbers: List[int], difference: int) -> List[Tuple[int, int]]:
    """Return all pairs (a, b) of numbers from the list with b - a equal to difference, in the order of a.
    >>> pairs_with_difference([1, 3, 5], 2)
    [(1, 3), (3, 5)]
    """
    return [(a, b) for a in numbers for b in numbers if b - a == difference]


# The text is a valid time if both parts are numbers in their ranges.
def is_valid_time(text: str) -> bool:
    """Check that a text of the form 'HH:MM' is a time of the day.
    >>> is_valid_time('23:59')
    True
    >>> is_valid_time('24:10')
    False
    """
    hours, minutes = text.split(":")
    return 0 <= int(hours) < 24 and 0 <= int(minutes) < 60


# Each vote counts for one candidate. I count, and the winner is the one with the most votes.
def election_winner(votes: List[str]) -> str:
    """
    Return the candidate with the most votes. In a tie return the name that comes first in the alphabet.
    >>> election_winner(['Eve', 'Ada', 'Eve'])
    'Eve'
    """
    counts = {}
    for name in votes:
        counts[name] = counts.get(name, 0) + 1
    return min(counts, key=lambda name: (-counts[name], name))


# The caesar alphabet is shifted by one for lower case letters. Other characters stay.
def next_letters(text: str) -> str:
    """Replace each lower case letter with the next one in the alphabet; 'z' becomes 'a'. Keep other characters.
    >>> next_letters('abz!')
    'bca!'
    """
    result = ""
    for c in text:
        if "a" <= c <= "z":
            result += chr((ord(c) - ord("a") + 1) % 26 + ord("a"))
        else:
            result += c
    return result


# The diagonal has the elements with equal row and column index.
def diagonal_sum(matrix):
    """
    Return the sum of the numbers on the main diagonal of a square matrix.
    >>> diagonal_sum([[1, 2], [3, 4]])
    5
    """
    return sum(matrix[i][i] for i in range(len(matrix)))


# The absolute difference tells how far a number is from the goal. min with a key finds the best guess.
def best_guess(guesses: List[int], goal: int) -> int:
    """Return the guess that is closest to the goal.
    >>> best_guess([10, 42, 70], 50)
    42
    """
    return min(guesses, key=lambda guess: abs(guess - goal))


# A recursive solution works: a list counts its inner lists one level deeper.
def depth(value) -> int:
    """Return how deeply lists are nested in value. A value that is not a list has depth 0.
    >>> depth([1, [2, [3]]])
    3
    """
    if not isinstance(value, list):
        return 0
    return 1 + max([depth(item) for item in value], default=0)


# Each step doubles the number of cells, so the number is two to the power of the hours, times the start.
def bacteria(start: int, hours: int) -> int:
    """Bacteria double every hour. Return how many there are after the given hours.
    >>> bacteria(3, 4)
    48
    """
    return start * 2**hours


# I walk over the characters and switch between upper and lower case, but only letters count.
def alternating_case(text: str) -> str:
    """Write the letters of a text alternately in upper and in lower case, starting with upper case.
    >>> alternating_case('hello')
    'HeLlO'
    """
    return "".join(c.upper() if i % 2 == 0 else c.lower() for i, c in enumerate(text))


# The check digit makes the digit sum a multiple of ten. I take the remainder and subtract it from ten.
def check_digit(number: int) -> int:
    """
    The check digit of a number is the digit that has to be added to the sum of its digits to reach a multiple of 10.
    >>> check_digit(123)
    4
    >>> check_digit(55)
    0
    """
    total = sum(int(digit) for digit in str(number))
    return (10 - total % 10) % 10
