"""A text for haystacks and small tokenizers, with a line longer than a haystack's."""

PROSE = """\
The lighthouse keeper counted the ships each evening. He wrote their names in a book with a blue cover.
Some nights there were none, and he wrote that down too.

In the spring a letter came from the harbor. It asked for the book, all of it, from the first page to the last. The \
keeper read the letter twice, folded it, and put it under the lamp. He had never thought that anybody would want to \
know. For three days he looked for a box of the right size; on the fourth he made one out of a door.

"What is in it?" asked the boy who came with the boat.
"Ships," said the keeper. "Mostly small ones."

The list below is part of what the book had:
    the Swift, with 12 barrels of salt;
    the Marigold, with 340 sheets of copper;
    the Two Sisters, with nothing at all.

Words that appear more often than others are memorized first. A special number is hidden in the text, and variables \
are assigned the value of other variables. Questions follow. The answer is in the chain.
"""
