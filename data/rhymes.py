"""The words of the songs, sorted by rhyme and by how many syllables they have. Lists only."""

from english import listed
from people import HE, SHE

RHYMES: dict[str, tuple[str, ...]] = {
    "bay": listed("""across the bay, at break of day, in clouds of spray, along the way, on market day,
        beneath the hay, and would not stay, the livelong day, in coats of grey, beside the clay, as
        children may, in early May"""),
    "night": listed("""throughout the night, by candlelight, in silver light, from left to right, at
        dizzy height, as black as night, and held on tight, in coats of white, with all {his} might, and
        felt all right"""),
    "sea": listed("""beside the sea, upon the quay, in time for tea, as light and free, beneath the
        tree, at half past three, for you and me, on bended knee, without a key, for all to see, as dark
        as tea"""),
    "town": listed("""across the town, both up and down, in cap and gown, in green and brown, with half
        a frown, in dressing gown, without a crown, as thistledown, for half a crown, on eiderdown,
        where none could drown"""),
    "shore": listed("""along the shore, outside the door, across the floor, for evermore, at half past
        four, above the store, with sail and oar, as once before, behind the door, and asked for more,
        with mighty roar"""),
    "sound": listed("""without a sound, along the sound, on solid ground, all safe and sound, and all
        around, in circles round, beside the mound, with ribbons bound, where pearls are found"""),
    "hill": listed("""upon the hill, beside the mill, while all was still, against {his} will, upon the
        sill, in morning chill, and drank {his} fill, with feather quill, and paid the bill, with time
        to kill"""),
    "gale": listed("""before the gale, beneath the sail, behind the rail, across the vale, with bread
        and ale, along the trail, in rain and hail, beside the pail, to tell the tale, inside the jail,
        without a nail, astride a whale"""),
    "stream": listed("""beside the stream, as in a dream, in morning's gleam, on buns and cream, in
        clouds of steam, beneath the beam, along the seam, behind the team, as it would seem, without a
        scheme"""),
    "rain": listed("""in wind and rain, along the lane, through fields of grain, across the plain,
        without a stain, on rusty chain, behind the pane, with might and main, and felt no pain, with
        tangled mane"""),
    "gold": listed("""in winter's cold, like polished gold, as stories told, within the fold, in robes
        of gold, as I was told, inside the hold, so brave and bold, and then was sold, a thousandfold,
        on paper rolled, before the cold"""),
    "brook": listed("""beside the brook, inside a book, in every nook, upon a hook, for all it took,
        with just one look, behind the cook, where herons look, with line and hook, and softly shook"""),
    "moon": listed("""beneath the moon, that afternoon, in early June, to some old tune, upon the dune,
        before the noon, on wooden spoon, in late monsoon, around the dune"""),
    "bread": listed("""above my head, in scarlet red, upon the bed, with crusts of bread, behind the
        shed, as someone said, on silver thread, with cheerful tread, by hunger led,
        where geese are fed, with eyes of red"""),
    "fire": listed("""beside the fire, above the spire, on copper wire, in old attire, and climbing
        higher, behind the choir, upon the pyre, through mud and mire, without a buyer, and would not
        tire"""),
    "clock": listed("""beside the clock, along the dock, upon the rock, without a lock, among the flock,
        in cap and smock, at ten o'clock, with one loud knock, around the block, in Sunday frock, and
        counted stock"""),
    "bell": listed("""at evening bell, inside the shell, beside the well, for who can tell, with nuts to
        sell, beneath the swell, in every dell, and all was well, and broke the spell, before {he} fell,
        by taste and smell"""),
    "place": listed("""around the place, without a trace, with smiling face, in silk and lace, at such a
        pace, in open space, with easy grace, and won the race, with empty case, and hid {his} face,
        before the mace"""),
    "tide": listed("""upon the tide, on either side, with honest pride, on waters wide, with none to
        guide, and almost cried, the whole world wide, with arms untied, and gently sighed, until it
        dried, where eels are fried"""),
    "west": listed("""toward the west, in Sunday best, above the nest, with all the rest, inside the
        chest, as if in jest, upon the crest, in coat and vest, by all the guests, and took {his} rest"""),
    "spring": listed("""at end of spring, upon a string, on silver wing, around the ring, like anything,
        without a king, and learned to sing, by broken string, and made things ring, in wedding ring"""),
    "snow": listed("""in falling snow, with lamps aglow, both to and fro, a year ago, in double row,
        both high and low, when breezes blow, and would not go, with head held low, where rushes grow,
        and none may know, in bright rainbow"""),
    "blue": listed("""in early dew, in coats of blue, for me and you, the whole night through, with all
        the crew, as good as new, without a clue, at half past two, for want of glue, the way we do, as
        well {he} knew"""),
    "deep": listed("""among the sheep, on waters deep, and half asleep, on cliffs too steep, for want of
        sleep, beside the heap, with watch to keep, and learned to leap, as children weep, with none to
        sweep"""),
    "star": listed("""beyond the bar, beneath a star, in lands afar, in pots of tar, beside the jar,
        both near and far, from spar to spar, upon the car, with door ajar, and hid the scar"""),
    "air": listed("""upon the stair, in evening air, without a care, beneath the chair, with greatest
        care, at summer fair, with tangled hair, with time to spare, beside the mare, and said a prayer,
        before the mayor"""),
}  # fmt: skip

TROCHEES = listed("""lantern, heron, kettle, fiddle, anchor, rudder, candle, sparrow, ferry, river,
    barrel, basket, lobster, herring, salmon, otter, rabbit, donkey, pony, swallow, robin, raven,
    seagull, curlew, plover, cuckoo, thistle, willow, poppy, daisy, bramble, teapot, saucer, hammer,
    thimble, needle, button, feather, pebble, whistle, shadow, thunder, kitten, spaniel, badger,
    hedgehog, beetle, spider, ladder, hammock, bucket, blanket, pocket, garden, window, chimney,
    shutter, ribbon, bonnet, slipper, lighthouse, steeple, compass, schooner""")  # fmt: skip
TROCHEE_TRADES = {
    "sailor": HE, "baker": SHE, "miller": HE, "cooper": SHE, "tailor": HE, "shepherd": HE, "pilot": SHE,
    "sexton": HE, "potter": SHE, "captain": HE, "merchant": SHE, "fiddler": HE, "pedlar": HE,
    "widow": SHE, "grocer": HE, "spinner": SHE,
}  # fmt: skip
TROCHEE_NAMES = listed("""Ada, Jonas, Silas, Walter, Ivy, Owen, Hetty, Martha, Edmund, Clara, Agnes,
    Dora, Peter, Susan, Flora, Simon, Amos, Kitty, Rufus, Esther, Felix, Jacob, Polly, Matthew,
    Arthur, Victor, Zillah, Percy, Hannah, Quentin""")  # fmt: skip
SHORT_VERBS = listed("""swung, sang, rolled, danced, slept, stood, lay, came, went, ran, turned, shone,
    slipped, strolled, swayed, leaned, dreamed, hummed, sailed, dropped, climbed, spun, skipped, crept,
    marched, woke, laughed, wept, sat, jumped, sank, hid, flew, fell, burned, blinked, rocked, knelt,
    swam, slid, leapt, tripped, bowed, fled, glowed, froze""")  # fmt: skip
SHORT_NOUNS = listed("""gull, bell, ship, lamp, cat, dog, moon, rope, boat, fish, goose, clock, cloud,
    wave, owl, crab, fox, horse, goat, mouse, drum, flag, oar, sail, star, bird, bee, moth, duck, hen,
    frog, lamb, wind, mast, seal, hat, shoe, wheel, wren, eel""")  # fmt: skip
SHORT_ADJECTIVES = listed("""grey, small, bright, cold, old, white, lame, slow, sly, proud, thin, fat,
    tame, wild, young, pale, lost, wet, soft, bold, shy, brown, black, strange, plain, glad, sad, late,
    blind, quick, round, sweet""")  # fmt: skip

COUNTED = (
    "gull", "boat", "crab", "candle", "herring", "goat", "swallow", "lantern", "sailor", "button", "apple",
    "lamb",
)  # fmt: skip
WORD_RHYMES = (
    ("door", "floor", "shore", "store", "oar"), ("wall", "hall", "stall", "shawl", "ball"),
    ("tree", "sea", "quay", "bee", "tea"), ("light", "night", "kite", "fright", "height"),
    ("boat", "coat", "goat", "stoat", "moat"), ("lane", "rain", "chain", "drain", "train"),
    ("bed", "shed", "bread", "thread", "sled"), ("bell", "shell", "well", "swell", "smell"),
    ("hill", "mill", "quill", "sill", "bill"), ("rock", "clock", "dock", "lock", "flock"),
    ("house", "mouse", "grouse", "blouse"), ("pail", "sail", "gale", "whale", "snail"),
)  # fmt: skip
LOSSES = (
    "One went away with the {word}", "One had an eye for the {word}", "One took a fall from the {word}",
    "One ran in fear of the {word}", "One went to look for the {word}", "One was in love with the {word}",
    "One fell asleep by the {word}", "One was the thief of the {word}", "One said goodbye to the {word}",
)  # fmt: skip
LEADS = listed("""and there, and so, then up, all day, at last, and still, by night, but then, by day,
    once more, alone, again, below, all night, and how, next door, up here, down there, no doubt,
    indeed, outside, inside, with me, with them, in spring, in snow""")  # fmt: skip
