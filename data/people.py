"""The people of Tolver: who they are, what they do all day, and how they are related.

Habits and daily work are verb phrases in the notation of `voice`.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Pronoun:
    """The small words that stand for somebody, and whether the verb takes an -s after them."""

    he: str
    him: str
    his: str
    himself: str
    takes_s: bool = True


HE = Pronoun("he", "him", "his", "himself")
SHE = Pronoun("she", "her", "her", "herself")
IT = Pronoun("it", "it", "its", "itself")
ME = Pronoun("I", "me", "my", "myself", takes_s=False)
WE = Pronoun("we", "us", "our", "ourselves", takes_s=False)
YOU = Pronoun("you", "you", "your", "yourself", takes_s=False)
THEY = Pronoun("they", "them", "their", "themselves", takes_s=False)


@dataclass(frozen=True)
class Person:
    """One inhabitant of the town."""

    first: str
    last: str
    pronoun: Pronoun
    trade: str
    home: str
    habit: str
    pride: str
    dread: str
    dish: str

    @property
    def full(self) -> str:
        return f"{self.first} {self.last}"


TOWNSFOLK = (
    Person("Ada", "Brill", SHE, "baker", "Lamp Lane", "~hum over the scales", "brass scales", "thunder",
           "plum cake"),
    Person("Tom", "Carrow", HE, "ferryman", "Gull Steps", "~count every wave aloud", "blue ferry", "debts",
           "fried herring"),
    Person("Nell", "Hask", SHE, "net-maker", "Net Street", "~talk to {his} needles", "bone needle", "moths",
           "barley broth"),
    Person("Jonas", "Pike", HE, "harbour master", "Custom House Hill", "~look twice at every clock",
           "silver whistle", "late ships", "cold mutton"),
    Person("Bess", "Tolley", SHE, "innkeeper", "Anchor Yard", "~remember what everybody owes",
           "copper kettle", "empty chairs", "onion pie"),
    Person("Silas", "Crane", HE, "lighthouse keeper", "Point Road", "~sleep in {his} boots", "great lamp",
           "fog", "boiled eggs"),
    Person("Ruth", "Amblin", SHE, "schoolteacher", "Chapel Row", "~correct the shop signs", "painted globe",
           "blotted ink", "toasted cheese"),
    Person("Walter", "Dunn", HE, "blacksmith", "Forge Corner", "~whistle between blows", "black anvil",
           "damp coal", "beef dumplings"),
    Person("Ivy", "Carrow", SHE, "pilot", "Gull Steps", "~taste the wind before speaking", "oilskin chart",
           "shifting sand", "cockle soup"),
    Person("Owen", "Mardle", HE, "fisherman", "Cod End", "~give every fish a name", "cork float", "seals",
           "potato cakes"),
    Person("Hetty", "Pike", SHE, "bell-ringer", "Custom House Hill", "~tap rhythms on the tables",
           "red bell rope", "silence", "gingerbread"),
    Person("Gideon", "Rusk", HE, "boatbuilder", "Slip Lane", "~smell the wood before cutting it",
           "long adze", "woodworm", "pea soup"),
    Person("Martha", "Quill", SHE, "postmistress", "Fish Cross", "~guess at the contents of parcels",
           "red wax seal", "lost letters", "lemon curd"),
    Person("Edmund", "Fenn", HE, "doctor", "Chapel Row", "~prescribe walking to everyone", "black bag",
           "geese", "stewed pears"),
    Person("Clara", "Voss", SHE, "clockmaker", "Minute Court", "~arrive exactly on time", "singing clock",
           "rust", "almond tart"),
    Person("Ned", "Hask", HE, "cabin boy", "Net Street", "~ask three questions at once", "knotted cord",
           "baths", "treacle toast"),
    Person("Agnes", "Thorne", SHE, "midwife", "Bramble Path", "~carry thyme in {his} sleeve",
           "stone mortar", "adders", "nettle soup"),
    Person("Barnaby", "Loom", HE, "tailor", "Thimble Street", "~measure people with {his} eyes",
           "long shears", "wild dogs", "cream buns"),
    Person("Dora", "Finch", SHE, "milkmaid", "Upper Meadow", "~sing to the cows in the rain",
           "milking stool", "bulls", "cheese on rye"),
    Person("Isaac", "Wren", HE, "captain", "Gull Steps", "~speak as if into a gale", "horn spyglass",
           "shallow water", "salt beef"),
    Person("Lydia", "Marsh", SHE, "merchant", "Wool Quay", "~write everything down twice", "green ledger",
           "blank pages", "roast duck"),
    Person("Peter", "Salter", HE, "fish-smoker", "Cod End", "~smell of oak and herring", "smoking shed",
           "leaking roofs", "fresh kippers"),
    Person("Susan", "Oakley", SHE, "cooper", "Barrel Lane", "~knock on things to hear if they ^be hollow",
           "iron hoop", "dry summers", "apple fritters"),
    Person("Hugh", "Barrow", HE, "carter", "Mill Hill", "~walk beside {his} horse to spare it",
           "yellow cart", "ice", "bread and dripping"),
    Person("Flora", "Jessop", SHE, "gardener", "Bramble Path", "~apologise to the weeds", "glasshouse",
           "snails", "radish salad"),
    Person("Simon", "Ketch", HE, "sailmaker", "Canvas Lane", "~sit cross-legged even at supper",
           "leather palm", "mice", "rice pudding"),
    Person("Maud", "Ellery", SHE, "fishwife", "Fish Cross", "~shout even when {he} ~whisper", "sharp knife",
           "cats", "baked haddock"),
    Person("Amos", "Tully", HE, "sexton", "Chapel Row", "~laugh at funerals and ~weep at weddings",
           "old spade", "moles", "rabbit stew"),
    Person("Kitty", "Dunn", SHE, "apprentice smith", "Forge Corner", "~bend spoons to think",
           "small hammer", "laughter behind doors", "honey bread"),
    Person("Rufus", "Bell", HE, "fiddler", "Anchor Yard", "~tune the same string all day",
           "cherrywood fiddle", "frost", "mushroom omelette"),
    Person("Esther", "Lowe", SHE, "chandler", "Lamp Lane", "~save the ends of everything", "candle mould",
           "draughts", "minted peas"),
    Person("Felix", "Grange", HE, "grocer", "Fish Cross", "~add up sums in {his} sleep", "tin coffee mill",
           "weevils", "ripe cheese"),
    Person("Winifred", "Gale", SHE, "librarian", "Minute Court", "~read while walking", "reading lamp",
           "jam on books", "walnut bread"),
    Person("Jacob", "Flint", HE, "mason", "Quarry Road", "~pat every wall in passing", "plumb line", "ivy",
           "mutton pasties"),
    Person("Polly", "Sand", SHE, "cockle-picker", "Shingle Row", "~run everywhere barefoot",
           "wicker basket", "crabs", "fried potatoes"),
    Person("Daniel", "Ochre", HE, "sign-painter", "Thimble Street", "~see faces in the clouds",
           "squirrel brush", "drizzle", "beetroot soup"),
    Person("Olive", "Penhall", SHE, "potter", "Kiln Lane", "~leave thumbprints on everything", "kick wheel",
           "careless elbows", "bean stew"),
    Person("Matthew", "Yarrow", HE, "shepherd", "Upper Meadow", "~speak to nobody before noon",
           "hazel crook", "wolves", "oat porridge"),
    Person("Rose", "Yarrow", SHE, "spinner", "Upper Meadow", "~tie a knot for each secret",
           "walnut spindle", "burrs", "bread pudding"),
    Person("Arthur", "Vane", HE, "miller", "Mill Hill", "~sneeze at every seventh sack", "great wheel",
           "rats", "leek pie"),
    Person("Jane", "Mardle", SHE, "cook", "Anchor Yard", "~salt {his} own tea by mistake", "iron skillet",
           "burnt milk", "pickled walnuts"),
    Person("Quentin", "Zeal", HE, "pedlar", "Ditch Road", "~promise to come back on Friday",
           "squeaking handcart", "honest questions", "hot chestnuts"),
    Person("Victor", "Exley", HE, "apothecary", "Minute Court", "~sniff at every bottle and ~sigh",
           "glass jar", "spilt ink", "boiled fowl"),
    Person("Zillah", "Orme", SHE, "glass-blower", "Kiln Lane", "~squint at the sun through bottles",
           "blowing iron", "hailstones", "quince jelly"),
    Person("Percy", "Knott", HE, "rope-maker", "Rope Walk", "~walk backwards out of habit", "longest rope",
           "scissors", "suet roll"),
    Person("Hannah", "Frome", SHE, "laundress", "Soap Alley", "~look at the sky every minute", "new mangle",
           "chimney smoke", "egg custard"),
)  # fmt: skip

BY_NAME = {person.first: person for person in TOWNSFOLK}

# (one, other, what the other is to the one, what the one is to the other)
KINSHIP = (
    ("Tom", "Ivy", "sister", "brother"),
    ("Nell", "Ned", "son", "mother"),
    ("Jonas", "Hetty", "daughter", "father"),
    ("Walter", "Kitty", "daughter", "father"),
    ("Matthew", "Rose", "wife", "husband"),
    ("Owen", "Jane", "wife", "husband"),
    ("Bess", "Rufus", "nephew", "aunt"),
    ("Felix", "Esther", "cousin", "cousin"),
    ("Flora", "Dora", "niece", "aunt"),
    ("Arthur", "Hugh", "brother-in-law", "brother-in-law"),
    ("Clara", "Victor", "cousin", "cousin"),
    ("Agnes", "Polly", "granddaughter", "grandmother"),
    ("Isaac", "Winifred", "niece", "uncle"),
    ("Olive", "Zillah", "cousin", "cousin"),
)  # fmt: skip


def kin_of(person: Person) -> dict[str, str]:
    """The person's relatives: first name, and what each is to the person."""
    forward = {other: is_to_one for one, other, is_to_one, _ in KINSHIP if one == person.first}
    backward = {one: is_to_other for one, other, _, is_to_other in KINSHIP if other == person.first}
    return forward | backward


def relation(person: Person, other: Person) -> str:
    """What the other is to the person: a sister, a husband, or simply a friend."""
    return kin_of(person).get(other.first, "friend")


TRADE_WORK = {
    "baker": ("~knead the dough", "~rake out the oven", "~set the loaves on the sill", "~sift the flour"),
    "ferryman": ("~bail out the ferry", "~row passengers over the harbour", "~coil the ferry rope",
                 "~scrape the oars"),
    "net-maker": ("~knot the herring nets", "~wind twine on the needles", "~tar the floats",
                  "~spread nets over the railings"),
    "harbour master": ("~log the ships", "~hoist the signal flags", "~sound the channel",
                       "~collect the harbour dues"),
    "innkeeper": ("~tap a barrel", "~polish the tankards", "~air the beds", "~chalk up the score"),
    "lighthouse keeper": ("~trim the lamp", "~polish the great lens", "~haul oil up the stair",
                          "~wind the lamp clock"),
    "schoolteacher": ("~clean the slates", "~set sums for the children", "~hear the spelling",
                      "~fill the inkwells"),
    "blacksmith": ("~pump the bellows", "~shoe the carter's horse", "~beat out a hinge", "~temper a blade"),
    "pilot": ("~sound the sandbank", "~guide a brig through the narrows", "~mark the chart",
              "~study the eddies"),
    "fisherman": ("~bait the long lines", "~sort the catch", "~patch the brown sail", "~gut the haddock"),
    "bell-ringer": ("~grease the bell frame", "~ring the noon bell", "~splice the bell ropes",
                    "~practise the changes"),
    "boatbuilder": ("~steam the planks", "~caulk a seam", "~plane the keel", "~fit the ribs"),
    "postmistress": ("~sort the letters", "~weigh the parcels", "~melt the sealing wax",
                     "~stamp the envelopes"),
    "doctor": ("~roll bandages", "~listen to a cough", "~mix a cordial", "~set a broken wrist"),
    "clockmaker": ("~oil the tiny wheels", "~wind forty clocks", "~file a pinion", "~clean a dial"),
    "cabin boy": ("~scrub the deck", "~peel the potatoes", "~fetch water for the crew",
                  "~tie up the hammocks"),
    "midwife": ("~grind herbs", "~boil clean linen", "~rock somebody's baby",
                "~dry lavender under the roof"),
    "tailor": ("~thread the needles", "~chalk a pattern", "~hem a pair of breeches", "~press the seams"),
    "milkmaid": ("~milk the cows", "~churn the butter", "~skim the cream", "~carry the pails"),
    "captain": ("~study the charts", "~inspect the rigging", "~pay the crew", "~choose a course"),
    "merchant": ("~check the invoices", "~bargain over wool", "~seal the contracts", "~weigh out pepper"),
    "fish-smoker": ("~split the herring", "~feed the oak fires", "~hang kippers on the rods",
                    "~pack the boxes"),
    "cooper": ("~bend the staves", "~drive down the hoops", "~char a cask", "~test the bungs"),
    "carter": ("~harness the horse", "~grease the axles", "~load the sacks", "~deliver the coal"),
    "gardener": ("~weed the beds", "~prune the pear tree", "~water the seedlings", "~stake the beans"),
    "sailmaker": ("~stitch the canvas", "~wax the thread", "~cut a jib", "~sew in the eyelets"),
    "fishwife": ("~cry the price of plaice", "~scale the fish", "~wash down the slab",
                 "~haggle with the cooks"),
    "sexton": ("~rake the chapel path", "~dig by lantern light", "~wind the chapel clock", "~clip the yew"),
    "apprentice smith": ("~sort the nails", "~hold the tongs", "~blow on the coals",
                         "~file the rough edges"),
    "fiddler": ("~rosin the bow", "~play for the dancers", "~learn a new reel", "~string the fiddle"),
    "chandler": ("~dip the candles", "~melt the tallow", "~trim the wicks", "~count out candles in dozens"),
    "grocer": ("~roast the coffee", "~slice the bacon", "~weigh the sugar", "~stack the tins"),
    "librarian": ("~dust the atlases", "~mend a torn page", "~stamp the books", "~hush the readers"),
    "mason": ("~dress the granite", "~mix the mortar", "~point the sea wall", "~split a slab"),
    "cockle-picker": ("~rake for cockles", "~rinse the shells", "~follow the ebb over the sand",
                      "~fill the baskets"),
    "sign-painter": ("~grind the colours", "~gild a letter", "~outline a mermaid", "~clean the brushes"),
    "potter": ("~throw a jug", "~wedge the clay", "~glaze the bowls", "~stoke the kiln"),
    "shepherd": ("~shear the ewes", "~call the dog", "~count the flock", "~mend the fold"),
    "spinner": ("~card the wool", "~spin a fine thread", "~wind the skeins", "~dye the yarn"),
    "miller": ("~dress the millstones", "~open the sluice", "~bag the meal", "~shake out the sacks"),
    "cook": ("~baste the joint", "~skim the broth", "~roll out the pastry", "~scour the pans"),
    "pedlar": ("~lay out ribbons", "~praise a second-hand pot", "~oil the handcart", "~invent a bargain"),
    "apothecary": ("~label the bottles", "~pound the roots", "~measure out drops", "~cork the phials"),
    "glass-blower": ("~blow a bottle", "~turn the hot glass", "~cool the beads", "~cut a windowpane"),
    "rope-maker": ("~twist the hemp", "~lay a cable", "~comb the fibres", "~coil the new line"),
    "laundress": ("~boil the sheets", "~starch the collars", "~peg out the shirts",
                  "~wring out the blankets"),
}  # fmt: skip
