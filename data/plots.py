"""The plots of the tales, in the notation of `voice`.

A plot is a list of steps, and a step is a list of ways to tell it. Whatever has a name in the cast (people A
to E, `thing`, `place`, `beast`, the three parts and their total) stays the same from the first step to the
last: that is what makes it a story.
"""

from dataclasses import dataclass

Step = tuple[str, ...]


@dataclass(frozen=True)
class Plot:
    """A story to be told with any cast."""

    titles: Step
    steps: tuple[Step, ...]


OPENINGS: Step = (
    "{A.full} ~be the {A.trade} of {A.home}, and <everyone|the whole town|all Tolver> ^know that {he} "
    "{A.habit}.",
    "there *be a {A.trade} <on|in> {A.home} <called|by the name of> {A.full}, <and {he}|who> {A.habit}.",
    "{A.full}, the {A.trade}, {A.habit}. {he.cap} ~live on {A.home} <with|beside> {his} {A.pride}.",
    "{front}, {A.full} the {A.trade} ~have nothing to do but {A.work.base} and <wait|whistle|watch "
    "{watchable}>.",
    "no {A.trade} <on the coast|in the county|between Tolver and {port}> ~be as {virtue} as {A.full}.",
    "{A.full} ~love three things: {his} {A.pride}, {A.dish}, and a quiet {daypart} on {A.home}.",
    "of all the people of {A.home}, {A.full} the {A.trade} ~be the most {virtue} and the <least|most> "
    "{mood}.",
    "{front}, when {weather_clause}, {A.full} {A.work} and {small_deed}.",
    "this *be the story that people ^tell on {A.home} about {A.full} the {A.trade}, who {A.habit}.",
    "{A.full} ~be afraid of {A.dread} and of nothing else. {he.cap} ~be a {A.trade}, and a {virtue} one.",
    "{front} {A.full} the {A.trade} {A.work} as usual, and {weather_clause}.",
    "<ask|question> anyone on {A.home} about {A.full}, and they will tell you that {he} {A.habit.now}.",
    "{weather_clause}. {A.full} the {A.trade} {A.work}, {A.work} and then {small_deed}.",
    "{front}, {A.full} ~wake with a {ailment} and {resolve} to {A.work.base} all the same.",
    "people ^say that {A.full} the {A.trade} *can {A.work.base} even in {his} sleep.",
)  # fmt: skip

ENDINGS: Step = (
    "and that <evening|night> they ^eat {A.dish} on {A.home}, with a {cup} of {drink} for everyone.",
    "{A} never {deed} again[, except on {feast}].", "and every year, on {feast}, {A} and {B} {deed@they}.",
    "{A} still {A.habit}, and {B} still {B.habit@B}; but they ^be <friends|good neighbours> all the same.",
    "<at last|in the end> {A} ~go home to {A.home}, {A.work}, and ~sleep like a {animal}.",
    "when people {ask_about} the matter, {A} only {small_deed}, and {B} {small_deed@B}.",
    "so it ~end, {how}, with {drinks} {where}.", "outside, {weather_clause}; inside, {A} {small_deed}.",
    "{B} still *tell the story, and each time {it_grows}.",
    '"{proverb.now}," {say_verb@B} {B}, and nobody *can deny it.',
    '"{proverb.now}," {say_verb} {A}, and {small_deed}.', "", "",
)  # fmt: skip

PLOTS: dict[str, Plot] = {
    "lost and found": Plot(
        titles=(
            "{A}'s {thing}", "the lost {trinket}", "where the {thing} was", "the {thing}",
            "what {beast_name} took",
        ),
        steps=(
            (
                "in {his} pocket {he} always ~carry a {thing}, which {his} <mother|father|aunt|grandfather> "
                "~have <given|left> {him}.",
                "{he.cap} ~own a {thing}, and ~polish it every {weekday} {how}.",
                "{he.cap} ~be never without {his} {thing}, not even when {he} {A.work}.",
                "round {his} neck, on a {colour} ribbon, {he} ~wear a {thing} that {he} ~will not sell for "
                "{few} {crop.plural}.",
                "above {his} bed *hang a {thing}, and {he} ~wish it good night before {he} ~sleep.",
            ),
            (
                "but {front} {he} ~reach for the {thing} and ~find only {junk}.",
                "one {weather_adj} {weekday}, somewhere between {place} and {place2}, the {thing} "
                "*disappear.",
                "then, {hour}, {he} ~notice that the {thing} *be gone. There *be {junk} in its place.",
                "but on {weekday} {he} ~come home {toward}, ~put {his} hand in {his} pocket, and the "
                "{thing} *be not there.",
            ),
            (
                '"{exclaim}!" ~cry {A}. "My {thing} is lost!" {he.cap} ~run straight to {place}, but there '
                '*be nothing there except {few} {crop.plural} and a {animal_adj} {animal}.',
                "{A} ~turn out every drawer. {he.cap} ~look under the {under_spot} and in the {in_spot}. No "
                "{thing}.",
                "first {he} ~look at {place}, then at {place2}; {he} even ~look under {someone}'s "
                "{under_spot}.",
                "{he.cap} ~search {place} from end to end, {mood} and {mood}, while {weather_clause}.",
            ),
            (
                '{he.cap} ~meet {B.full} the {B.trade} {where}. "Have you seen my {thing}?" ~ask {A}. '
                '"{vague} But I have seen {beast_name} the {beast}, carrying something in {beast_his} '
                'mouth," *say {B}.',
                '"I have lost my {thing}," {A} ~tell {B} the {B.trade}. "{exclaim}," *say {B}. "When did '
                'you last have it?" "{when.cap}, I think, at {place2}."',
                '{B.full}, who {B.habit@B}, *stop {B.his} work at once. "A {thing}? We shall look '
                'together," *say {B}.',
                'at {place2} {B} the {B.trade} *be {B.work.ing}. "What is the matter?" *ask {B}. {A} '
                '~explain {how}.',
            ),
            (
                "so {A} and {B} ^search {street} and {street}, {few} houses and {few} yards, and ^find a "
                "{thing_adj} {tool}, {junk} and a {garment}, but not what they ^be looking for.",
                "they ^ask {someone}, who *know nothing, and {someone}, who *know even less.",
                "{B} *look high and {A} ~look low. {clause.cap}. {weather_clause.cap}. The {thing} *be "
                "nowhere.",
                '"{remark.now.spoken@I}" *say {someone}, which *be no help at all.',
                "by {hour_word} they ~have been {toward} and {toward}, and {A}'s {body} *ache.",
            ),
            (
                "then, {where}, {B} *hear a {sound}. There *sit {beast_name}, and under {beast_his} paw *be "
                "the {thing}.",
                "it *be {beast_name} the {beast} who *lead them to it. Behind {place3}, among {few} "
                "{crop.plural}, *lie the {thing}.",
                "at {place3} {beast_name} the {beast} *be asleep on a heap of {strand}. {A} ~lift one "
                "corner, and there *be the {thing}, bright as ever.",
                "\"{exclaim}!\" *shout {B} from {place3}. In {beast_name}'s {vessel}, beneath the {bulk}, "
                "*shine the {thing}.",
            ),
            (
                "{A} ~be so {mood_good} that {he} ~give {B} {load}, and ~give {beast_name} {food}.",
                '"I shall never lose it again," *say {A}. {B} {small_deed@B}. "You said that <last '
                '{season}|before|on {weekday}>," {B.he} *answer.',
                "{A} ~thank {B} {how}, and ~sew up the hole in {his} pocket that very {daypart}.",
                '"How can I thank you?" ~ask {A}. "{B.dish.cap}," *say {B}, and so it *be.',
            ),
        ),
    ),
    "the swaps": Plot(
        titles=(
            "{A} makes a bargain", "the long way to a {swap5}", "{A}'s five swaps", "from {swap1} to {swap5}",
        ),
        steps=(
            (
                "{A} ~need a {swap5}, and ~have nothing to pay with but a {swap1}.",
                "what {A} ~want most in the world *be a {swap5}; what {he} ~have *be a {swap1}.",
                "{front}, {A} ~take {his} {swap1} under {his} arm and ~go out to change it for a {swap5}.",
            ),
            (
                '{B.full} the {B.trade} *like the {swap1}. "I have no {swap5}," *say {B}, "but I will give '
                'you a {swap2} for it." So {A} ~take the {swap2}.',
                'the first person {he} ~meet *be {B} the {B.trade}. "A {swap1}! Will you take a {swap2} for '
                'it?" *ask {B}. {A} ~agree {how}.',
                '"That is a fine {swap1}," *say {B} the {B.trade} {where}. "Mine is {broken}. Take this '
                '{swap2} and we are even." And they ^change.',
            ),
            (
                'with the {swap2} {he} ~go to {C.full} the {C.trade}, who *be {C.work.ing@C}. "A {swap2} is '
                'exactly what I lack," *say {C}. "Here, have my {swap3}."',
                '{A} ~carry the {swap2} {toward}. There *stand {C} the {C.trade}. "I will swap you this '
                '{swap3} for that {swap2}," *say {C}, and it *be done.',
                "the {swap2} *be {heavy}, and {A} ~be glad when {C} the {C.trade} *offer a {swap3} for it.",
            ),
            (
                '{D.full} *look at the {swap3} {how}. "{exclaim}. I would give a {swap4} for such a '
                '{swap3}," *say {D}. "Then give it," *say {A}.',
                "now {A} ~have a {swap3}. {D} the {D.trade}, who {D.habit@D}, *have a {swap4} and no "
                "{swap3}. You can guess the rest.",
                "at {place} {D} the {D.trade} *be {mood}, for want of a {swap3}. {A} ~part with it, and "
                "~get a {swap4}.",
            ),
            (
                "and who *have a {swap5}? {E.full} the {E.trade}. And what *do {E} want? A {swap4}!",
                'last of all {he} ~come to {E} the {E.trade}. "My {swap5} for your {swap4}," *say {E}. {A} '
                '~can hardly speak for joy.',
                '{hour} {A} ~find {E} the {E.trade} {where}, looking {mood}. "Would you take a {swap5} for '
                'that {swap4}?" *ask {E}.',
            ),
            (
                "so {A} ~go home with a {swap5}: a {swap1} for a {swap2}, a {swap2} for a {swap3}, a "
                "{swap3} for a {swap4}, and a {swap4} for a {swap5}.",
                "that *be how {A}'s {swap1} *become {B}'s, {B}'s {swap2} *become {C}'s, {C}'s {swap3} "
                "*become {D}'s, {D}'s {swap4} *become {E}'s, and {E}'s {swap5} *come home to {A.home}.",
                '"And what did the {swap5} cost you?" ~ask {his} neighbour. "A {swap1}," ~say {A}, "and '
                'sore feet."',
            ),
        ),
    ),
    "the storm": Plot(
        titles=(
            "the night of the storm", "{total} boats", "{A} and the gale", "the {month} storm", "all home",
        ),
        steps=(
            (
                "{front} {total} boats ^go out from Tolver after {fish_kind}, and {A} ~watch them go.",
                "{total} boats ^leave the harbour that morning, for the {fish_kind} ~have been seen off "
                "{the_port}.",
                "it *be {month}, and {total} boats ^be at sea. {B.full} the {B.trade} *be aboard one of "
                "them.",
            ),
            (
                "{hour} the wind *turn {compass}. The {bell} *ring. The {water} *go {sea_adj}, then "
                "{sea_adj}, then black.",
                '"I do not like that sky," *say {C} the {C.trade}. It *be {sky_adj} over the Point, and '
                '{birds_in}.',
                "by {hour_word} nobody *can stand upright on {street}. Slates ^fly like {bird.plural}.",
                "all at once it {storm_verb}. {thing_clause.cap}; {weather_clause}; the children ^be called "
                "in.",
            ),
            (
                '{part1} boats ^come in before dark, {how}, with their sails in rags. "And the others?" '
                '~ask {A}. Nobody *know.',
                "before {meal} {part1} of the {total} ^be safe inside the sea wall. That *leave {left1}.",
                "{A} ~count them in from {place}: {part1} boats, and then no more. There ^be {left1} still "
                "out.",
            ),
            (
                "{A} ~fetch {his} {A.pride} and a lantern, and ~go down to {place2}, although {he} ~be a "
                "{A.trade} and no sailor.",
                '"Light a fire," ~say {A}. "The lamp is not enough." So they ^burn {strand}, '
                '{furniture.plural}, and the {mendable} from {place}.',
                "{A} and {C} ^ring the {bell} by turns until their hands ^bleed. {remark_in_storm}",
                "they ^launch the lifeboat: {C} at the tiller, {A} and {few_rowers} others at the oars.",
            ),
            (
                "toward midnight {part2} boats ^come round the Point together, following the light.",
                "{hour_late} there *be a shout. One sail, then another, until {part2} boats ~have come in.",
                "then {part2} more ^come home, one towing the next. Now only {part3} ^be missing.",
            ),
            (
                "at dawn the last {part3} ^come in, and {B} *be at the <tiller|bow|oars>, {mood} and "
                "soaked, with {food} in {B.his} pocket.",
                'and when the sun *rise {part3} boats ^be seen off {place3}, low in the water but whole. '
                '"{B}!" ~shout {A}. "{answer_tired.spoken}" *shout {B}.',
                "it *be morning before the other {part3} ^come. {B} *climb up the ferry steps and *ask for "
                "{drinks}.",
            ),
            (
                "{part1} and {part2} and {part3} ^make {total}. {total.cap} ^go out, and {total} ^come home.",
                "{C} *chalk it on the door of {landmark}: {total} out, {total} in.",
                "nobody *be lost. {A} ~count again, to be sure: {part1}, {part2}, {part3}. {total.cap}.",
            ),
        ),
    ),
    "the contest": Plot(
        titles=(
            "{A} against {B}", "the {prize} for the best {contest_dish}", "a contest", "who won the {prize}",
            "the judge of {the_feast}",
        ),
        steps=(
            (
                "every year on {the_feast} there *be a prize for the best {contest_dish}, and every year "
                "{B.full} the {B.trade} *win it.",
                "on {the_feast} {C.full} *offer a {prize} to <anyone|whoever *be able> to cook a better "
                "{contest_dish} than {B} the {B.trade}.",
                '"My {contest_dish} is better than yours," ~say {A} to {B}. "Prove it on {the_feast}," *say '
                '{B}. The prize *be a {prize}.',
            ),
            (
                "{A} ~practise for {few} days. The first {contest_dish} *be {taste}. The second *be {taste} "
                "and {taste}.",
                "{A} ~borrow a {tool} from {someone} and {bulk} from {someone}, and ~shut the door.",
                "for a week {A} ~do not {A.work.base}. {he.cap} ~peel and ~chop and ~stir, and {small_deed}.",
                "{A} ~know one secret: a {small_vessel} of {bulk} at the end. {he.cap} ~tell nobody[ but "
                "the {pet}].",
            ),
            (
                '{B} *laugh. "A {A.trade} cannot cook," *say {B.he}, and {deed@B}.',
                "{B}, meanwhile, {deed@B}, and *sleep well.",
                'on the eve of {the_feast}, {B} {small_deed@B} and *say: "{remark.now@I}"',
            ),
            (
                "the judge *be {C}, who {C.habit@C}. {C.he.cap} *taste {B}'s {contest_dish}. "
                "\"{taste.cap},\" *say {C}. {C.he.cap} *taste {A}'s. {C.he.cap} *taste it again.",
                "{hour} on {the_feast} both dishes ^stand on the {furniture}. {weather_clause.cap}. {C} "
                "*lift the spoon.",
                "half the town *come to see. {calm_scene.cap} Then {C} the {C.trade} *call for silence and "
                "*eat.",
            ),
            (
                "\"{B}'s is {taste},\" *say {C} {how}, \"but {A}'s has {courage} in it.\" And {A} ~be given "
                "the {prize}.",
                '"I cannot choose," *say {C}. "Break the {prize} in two." But {A} {small_deed_kind} and '
                '~give it to {B}.',
                '"{A}," *say {C} at last. {B} *turn {face_colour}. {A} ~hold the {prize} as if it ^be made '
                'of {bulk}.',
                '"{B}, as always," *say {C}. {A} ~be {mood}, but only until {meal}.',
            ),
            (
                '"What did you put in it?" *ask {B}. "{bulk.cap}," ~say {A}. "{exclaim}," *say {B}.',
                "afterward they ^sit {where} and ^eat what *be left, {A} from {B}'s dish and {B} from {A}'s.",
                '"Next year," *say {B}, "we cook together." And they ^do.',
            ),
        ),
    ),
    "the stranger": Plot(
        titles=(
            "the stranger with the {thing}", "a visitor from {the_port}", "the guest", "who was it?",
            "the {the_colour} coat",
        ),
        steps=(
            (
                "{front} a stranger *come off the {vessel_type} from {the_port}, carrying a {thing} and "
                "nothing else.",
                "nobody *see the stranger arrive. {hour} there *be simply one more person {where}, in a "
                "{the_colour} coat.",
                "a stranger in a {the_colour} coat *knock at the door of {place}, and it *be {A} who ~open.",
            ),
            (
                '"I am looking for somebody who can {skill@they}," *say the stranger. "{vague.spoken}" ~say '
                '{A}. "But come in out of the {rain_noun}."',
                '"Is there a bed?" *ask the stranger. "There is a {furniture}," ~say {A}, "and {food}."',
                "the stranger *say very little: that {the_port} *be far, that the {drink} *be good, that "
                "the {thing} *be not for sale.",
            ),
            (
                "people ^begin to talk. {B} *think the stranger *be a {trade_guess}; {C} *think a "
                "{trade_guess}.",
                '"A thief," *say {B} the {B.trade}. "A prince," *say {C} the {C.trade}. "A guest," ~say {A}.',
                "{B} *say that the {thing} *be stolen. {C} *say that {someone} ~have seen one like it in "
                "{port}.",
            ),
            (
                "for {few_days} the stranger {stranger_deed}, and {stranger_deed}. {A} ~ask no questions.",
                "the stranger {stranger_deed}, and the children ^follow. {calm_scene.cap}",
                "every {daypart} the stranger *sit {where} and *turn the {thing} over and over.",
            ),
            (
                "on {weekday} {B} *can bear it no longer. \"Who are you?\" *ask {B}. The stranger "
                "{stranger_move}. \"I was born on {street},\" *say the stranger. \"This {thing} was made "
                "here, by {A}'s grandmother.\"",
                'then {A} ~turn the {thing} to the light and ~see, scratched on the back, the name of {his} '
                'own street: {A.home}. "My father left it with me," *say the stranger. "He was a {A.trade} '
                'too."',
                '"I promised a friend," *say the stranger at last, "to bring this {thing} home to {A.home}. '
                'He sailed on the {the_ship}, and he spoke of nothing else."',
            ),
            (
                "on the next tide the stranger *leave, {how}. The {thing} *stay behind on {A}'s {furniture}.",
                "in the morning the bed *be empty and the {thing} *lie on the pillow. {A} ~keep it still.",
                "{A} ~walk with the stranger as far as {place2}. They ^shake hands. Neither *say goodbye.",
            ),
        ),
    ),
    "the broken thing": Plot(
        titles=("{A} breaks {B}'s {B.pride}", "the mended {B.pride}", "an accident", "{A} tells the truth"),
        steps=(
            (
                "{front} {A} ~borrow {B}'s {B.pride} without asking, and ~let it fall.",
                "{A} only ~mean to look at {B}'s {B.pride}. But {A.his} elbow ~slip, and it *lie in "
                "{few_pieces} pieces.",
                "while {B} *be {where}, {A} ~touch the {B.pride} that {B} *love. There *be a {sound}, and "
                "it *be broken.",
            ),
            (
                "{A} ~sweep the pieces into a {vessel} and ~hide them under the {under_spot}.",
                '"{exclaim}," ~whisper {A}. Nobody ~have seen, except {beast_name} the {beast}.',
                "{he.cap} ~put the pieces in {his} {garment} and ~slip away {toward}, {mood} and {mood}.",
            ),
            (
                "{B} *look everywhere. \"My {B.pride}!\" *say {B}. \"It must be {C}'s {pet} again.\" And "
                "{A} ~say nothing.",
                '"Somebody has taken my {B.pride}," *say {B}, and *look hard at {C} the {C.trade}. {A} '
                '{small_deed}.',
                "soon the whole of {B.home} *be saying that {C} the {C.trade} ~have done it. {C} *be {mood}.",
            ),
            (
                "{A} ~can not eat {his} {A.dish}. {he.cap} ~lie awake and ~listen to the {sound} of the "
                "{vessel_type.plural}.",
                "that night {he} ~dream of {dream_of}, and ~wake {mood}.",
                "{he.cap} ~try to {A.work.base}, but {his} hands ^shake. {calm_scene.cap}",
            ),
            (
                "{hour} {he} ~knock at {B}'s door. \"It was not {C},\" ~say {A}. \"It was I.\"",
                '"I broke it," ~say {A}, all in one breath. "I broke your {B.pride}, and I hid it, and I '
                'let you blame {C}."',
                'at last {A} ~take the {vessel} from its hiding place, ~carry it {toward}, and ~set it '
                'before {B}. "I did this," {he} ~say.',
            ),
            (
                'for a long time {B} *say nothing. Then {B.he} *fetch the glue. "You hold and I press," '
                '*say {B}.',
                '{B} *count the pieces. "It will mend," {B.he} *say, "but you must tell {C} yourself." {A} '
                '~do so before {meal}.',
                '"I knew," *say {B}. "{beast_name} told me." And {B.he} {small_deed@B}.',
            ),
            (
                "they ^mend it with {strand} and {bulk}. It *be crooked now, but {B} *like it better than "
                "before.",
                'you can still see the crack. {B} *show it to visitors and *say: "That is where {A} told '
                'the truth."',
                "{A} ~beg {C}'s pardon with {food}, and {C} *grant it with {drinks}.",
            ),
        ),
    ),
    "the secret present": Plot(
        titles=(
            "{A}'s secret", "a present for {B}", "the {the_colour} parcel", "{B}'s birthday",
            "what {A} was making",
        ),
        steps=(
            (
                "in {the_month} {B} the {B.trade} *will be {age}, and {A} ~mean to make {B.him} a {present}.",
                "{A} ~hear {B} say that {B.he} {never_had} a {present}. {he.cap} {small_deed}, and ~begin "
                "that night.",
                '"What does {B} want for {B.his} birthday?" ~ask {A}. "A {present}," *say {C}. "But who '
                'could afford it?"',
            ),
            (
                "every night, after {he} ~have <finished|done> {his} own work, {A} ~shut the {indoors} door "
                "and ~take out {his} {tool}.",
                "{he.cap} ~buy {bulk} from {someone} and {strand} from {someone}, a little at a time, so "
                "that nobody *will guess.",
                "the work *go {how}. Twice {he} ~spoil it, and twice {he} ~begin again.",
            ),
            (
                '{B} *notice the light. "What do you do all night?" *ask {B}. "I {deed.base@I}," ~say {A}. '
                '{B} *do not believe it.',
                '"{A} is hiding something," *say {B} to {C}. "{vague.spoken}" *say {C}, who *know.',
                "once {B} *come in without knocking. {A} ~sit down on the {present} and ~talk about {topic} "
                "until {B.he} *leave.",
                '{B} *be hurt. "You used to {deed.base@you} with me," *say {B}. {A} ~turn {face_colour} and '
                '{small_deed}.',
            ),
            (
                "by the eve of the birthday only the {handle} *be missing. {calm.cap}, and the candle *go "
                "out.",
                "on the last night {beast_name} the {beast} *knock the {present} off the {furniture}. {A} "
                "~mend it until dawn.",
                "{calm_scene.cap} But {hour} it *be ready.",
            ),
            (
                '"For you," ~say {A}, and ~hold out the parcel. {B} *untie the string {how}. It *be the '
                '{present}.',
                "on the day itself {C} *bring {dish}, {someone} *bring {load}, and {A} ~bring the {present} "
                "in {the_colour} paper.",
                "{B} *open the door, and there on the step *stand the {present}, with a {flower} tied to it.",
            ),
            (
                '"So that is what you were doing," *say {B}, and for once {B.he} *do not know what else to '
                'say.',
                '{B} *laugh until {B.he} *have to sit down. "And I thought you were angry with me!" *say '
                '{B}.',
                "{B} *use the {present} every day, and *keep the {the_colour} paper in a drawer.",
            ),
        ),
    ),
    "the wager": Plot(
        titles=(
            "the wager", "{A} bets {part1} pence", "{part1} pence", "a foolish bet",
            "what {A} wagered with {B}",
        ),
        steps=(
            (
                '"I can {feat} before the {bell} rings," ~say {A} <in|outside> the Blue Anchor. "I bet you '
                '{part1} pence that you cannot," *say {B} the {B.trade}.',
                "{B.full} *bet {A} {part1} pence that {he} ~can not {feat} before {meal}. They ^shake hands "
                "on it.",
                "it *begin with a quarrel about {topic}, and it *end with a wager: {part1} pence that {A} "
                "~can {feat} in a day.",
            ),
            (
                '{C} the {C.trade} *hold the money. "{proverb.now}," *say {C}.',
                '"And if it rains?" ~ask {A}. "Then you get wet," *say {B}.',
                "the whole of {street} *come to look on, and {someone} *sell {food} to the crowd.",
            ),
            (
                "{A} ~start {hour}, {how}. {calm_scene.cap} {he.cap} ~be {mood} at first.",
                "at the beginning it *go well. Then {calm}, and {A} ~have to begin again.",
                "{he.cap} ~take off {his} {garment} and ~set to work. Nobody *speak. {weather_clause.cap}.",
            ),
            (
                'halfway, {his} {body} *begin to hurt. "Give up," *call {B}. "Never," ~call {A}.',
                "then {beast_name} the {beast} *run straight across {his} path. The crowd *hold its breath.",
                "\"You are slower than {someone}'s {pet},\" *say {B}. {A} ~do not answer; {he} ~have no "
                "breath to spare.",
            ),
            (
                'as the first stroke of the {bell} *sound, {A} ~be done. "{part1.cap} pence," {he} ~say, '
                'and ~hold out {his} hand.',
                'the {bell} *ring, and {A} ~be one step short. "{part1.cap} pence," *say {B}, and *hold out '
                '{B.his} hand.',
                '"Done!" ~cry {A}. {C} *look at the clock, and *look again, and *give {him} the {part1} '
                'pence.',
                '"Enough!" *say {C}. "You have both lost: one {his_time}, the other {his_temper}." And '
                '{C.he} *spend the {part1} pence on {dish}.',
            ),
            (
                "the loser *buy the winner {drinks}, and the winner *buy the loser {food}; so nobody *be "
                "any richer.",
                '"Shall we say double, for {weekday}?" *ask {B}. "{vague.spoken}" ~say {A}.',
                'from that day on, when anyone <in Tolver|on {street}> *boast, people ^say: "Can you '
                '{feat}?"',
            ),
        ),
    ),
    "the runaway": Plot(
        titles=(
            "{beast_name} runs away", "catch that {beast}", "{beast_name}'s holiday",
            "the {beast} of {A.home}", "where {beast_name} went",
        ),
        steps=(
            (
                "{A} ~keep a {beast} called {beast_name}, a {animal_adj} {beast} with one white ear.",
                "{beast_name} *be {A}'s {beast}, and the most {vice} {beast} <in Tolver|on {A.home}>.",
                "on {weekday} {A} ~leave the gate open, and {beast_name} the {beast} *walk out.",
            ),
            (
                'at {place} {beast_he} *eat {few} {crop.plural}. "{exclaim}!" *shout {B} the {B.trade}, and '
                '*run after.',
                "first {beast_he} *go to {place}, where {beast_he} *knock {B} the {B.trade} into a {vessel} "
                "of {bulk}.",
                "{B} the {B.trade} *be {B.work.ing@B} at {place} when {beast_name} *come by. There *be a "
                "{sound}. After that there *be nothing left to work on.",
            ),
            (
                "from {place} {beast_he} *run to {place2}. There {beast_he} *tear {C}'s {garment}, so {C} "
                "the {C.trade} *follow too.",
                "next {beast_he} *visit {place2}, *frighten {few} {bird.plural} and *steal {food} from {C} "
                "the {C.trade}.",
                "at {place2} {C} the {C.trade} *try to catch {beast_him} with a {tool}, and *catch the "
                "{feast_thing} instead.",
            ),
            (
                "soon {beast_name} *have {B}, {C}, {someone} and {few} children behind {beast_him}, and "
                "still {beast_he} *run.",
                "{toward} they all ^go, {beast_name} in front, then {B}, then {C}, then everyone else. "
                "{calm_scene.cap}",
                '"Stop that {beast}!" ^cry {B} and {C}. {someone} *hold out a {tool}; {beast_name} *jump '
                'over it.',
            ),
            (
                "{A} ~hear the noise and ~come out. {he.cap} ~do not shout. {he.cap} {small_call}, and "
                "{beast_name} *stop.",
                "at last, behind {place3}, {A} ~sit down on the ground and ~open a bag of {bulk}. "
                "{beast_name} *come to {him} at once.",
                "it *be the smell of {A.dish} that *end it. {beast_name} *notice it as far away as "
                "{place3}, and *come home by the window.",
            ),
            (
                "{A} ~pay {B} for the {crop.plural} and ~mend {C}'s {garment}. {beast_name} *sleep for two "
                "days.",
                "\"What do you say to {B} and {C}?\" ~ask {A}. {beast_name} *look at them {how}, and *eat "
                "{B}'s hat.",
                "there *be a new bolt on the gate now, and {beast_name} ~have already learned to open it.",
            ),
        ),
    ),
    "the debt": Plot(
        titles=("{total} pence", "what {A} owed", "the debt", "{A} pays {B}", "a matter of {total} pence"),
        steps=(
            (
                "{A} ~need a {thing}, so {he} ~borrow {total} pence from {B.full} the {B.trade}.",
                "{front} {B} the {B.trade} *lend {A} {total} pence to buy a {thing}.",
                '"Lend me {total} pence," ~say {A} to {B}, "and you shall have it back by {feast}." {B} '
                '*write it down.',
            ),
            (
                'in {season} {he} ~sell {load} and ~pay back {part1}. "{total.cap} less {part1} is '
                '{left1}," *say {B}.',
                "{he.cap} ~work for {someone} for {few_days}, and ~bring {B} {part1} pence. That *leave "
                "{left1}.",
                "on {weekday} {A} ~pay {part1} pence. {B} *strike out {total} and *write {left1}.",
            ),
            (
                'then {mishap_A}, and {A} ~can pay nothing. "There is no hurry," *say {B}, and '
                '{small_deed@B}.',
                "but a {ailment} *keep {A} in bed, and {left1} pence ^stay on the page.",
                "{weather_clause.cap}, and there *be no work. {A} ~eat {food} and ~think of {left1} pence.",
            ),
            (
                'after {the_feast} {A} ~bring {part2} pence in a {vessel}. "{left1.cap} less {part2} is '
                '{part3}," *say {B}.',
                "{he.cap} ~sell {his} {garment} for {part2} pence and ~give it all to {B}. Now {he} ~owe "
                "{part3}.",
                "next {he} ~pay {part2}, in very small coins. {B} *count them {how}. There ^be {part3} to "
                "go.",
            ),
            (
                "the last {part3} ^be the hardest. {A} {A.work}, {A.work} and {A.work}, and {hour} {he} "
                "~have them.",
                '"Here are the last {part3}," ~say {A}. {B} *close the book. "{part1.cap} and {part2} and '
                '{part3}: {total}. We are quits."',
                "{A} ~find the last {part3} pence {where}, in an old {garment}, and ~run all the way to "
                "{B.home}.",
            ),
            (
                "that night {A} ~sleep better than {he} ~have slept since {season}.",
                '"And the {thing}?" *ask {B}. "It broke on {weekday}," ~say {A}. They ^laugh for a long '
                'time.',
                "{B} *fetch {B.dish} and two forks, for a debt paid *be worth a supper.",
            ),
        ),
    ),
    "the message": Plot(
        titles=("the message", "how {bulk1} became {bulk2}", "a word from {A}", "what {A} really said"),
        steps=(
            (
                '{A} ~need {bulk1} badly. {he.cap} ~say to {B} the {B.trade}: "Tell {E} to send {part1} '
                '{vessel1} of {bulk1} to {place}."',
                '"Take a message to {E} the {E.trade}," ~say {A} to {B}. "I want {part1} {vessel1} of '
                '{bulk1}, at {place}."',
            ),
            (
                'but {calm}, and {B} *think of other things. {where.cap} {B.he} *meet {C} and *say: "{A} '
                'wants {part1} {vessel1} of {bulk2}, at {place}. Tell {E}."',
                '{B} *repeat it all the way {toward}: {part1} {vessel1} of {bulk1}, {part1} {vessel1} of '
                '{bulk1}. Then a {animal} {animal_deed}, and when {B.he} *see {C} {B.he} *say: "{part1.cap} '
                '{vessel1} of {bulk2} for {A}, at {place}."',
            ),
            (
                '{C} the {C.trade} *be in a hurry. "{D}," *call {C.he}, "{A} wants {part1} {vessel2} of '
                '{bulk2}, at {place}!"',
                '{C}, who {C.habit@C}, *tell {D} the {D.trade}: "It is for {A}, at {place}. {part1.cap} '
                '{vessel2} of {bulk2}."',
            ),
            (
                '{D} *find {E} {where}. "For {A}," *say {D}. "{part1.cap} {vessel2} of {bulk2}, at '
                '{place2}, and quickly."',
                'and {D} *say to {E}, {how}: "{part1.cap} {vessel2} of {bulk2} to {place2}. {A} is waiting."',
            ),
            (
                "so while {A} ~wait at {place} for {bulk1}, {part1} {vessel2} of {bulk2} ^arrive at "
                "{place2}.",
                "{E} *do as {E.he} *be told. {hour} there ^stand {part1} {vessel2} of {bulk2} outside "
                "{place2}, and nobody *know why.",
            ),
            (
                '"I said {bulk1}!" ~cry {A}. "{D} said {bulk2}," *say {E}. "{C} said {bulk2}," *say {D}. '
                '"{B} said {bulk2}," *say {C}. Everyone *look at {B}, and {B} {small_deed@B}.',
                "{A} ~ask {E}, {E} *ask {D}, {D} *ask {C}, and {C} *ask {B}. It *be {B} who ~have changed "
                "the {bulk1}, {C} the {vessel1}, and {D} the place.",
            ),
            (
                "{someone} *buy the {bulk2}. From then on {A} ~carry {his} own messages.",
                '{A} ~taste the {bulk2}, or ~pretend to. "{taste.cap}," {he} ~say. "But next time I shall '
                'write it down."',
            ),
        ),
    ),
    "the quarrel": Plot(
        titles=(
            "the quarrel", "{A} and {B} do not speak", "not a word", "{few_days} of silence",
            "a line across {A.home}",
        ),
        steps=(
            (
                "{A} and {B} the {B.trade} ^quarrel over a {thing}. {A} ~say that it *belong to {him}; {B} "
                "*say that it *do not.",
                'it *begin with {topic}. "{remark.now.spoken@I}" ~say {A}. "You are wrong," *say {B} the '
                '{B.trade}.',
                "{front} {B} the {B.trade} *call {A} {vice}, and {A} ~call {B} {vice}.",
            ),
            (
                "for {few_days} they ^do not speak. If {A} ~walk {toward}, {B} *go the other way.",
                "{A} ~send notes to {B} by {C} the {C.trade}. {B} *send them back, with the spelling "
                "corrected.",
                "{B} *paint a {colour} line on the ground. {A} ~plant {flower.plural} along it.",
            ),
            (
                '"{remark.now.spoken@I}" *say {C}. "Not to me," ~say {A}. "Tell {B}."',
                "{C} *try to make peace with {dish}. Each of them *eat half, at different times.",
                "soon nobody <on {street}|in Tolver> *remember how it ~have begun. {calm_scene.cap}",
            ),
            (
                "then, {front}, {mishap}. {A} ~hear the {sound} from {his} bed.",
                "but {hour} on {weekday} there *be a cry from {place}. {B} ~have fallen into the {water}, "
                "and {A} ~be the only one near.",
                "one {weather_adj} night {weather_clause}, and {B}'s roof *come off. There *be no one awake "
                "but {A}.",
            ),
            (
                "{A} ~do not stop to think. {he.cap} ~take a rope and a {tool}, and ~run.",
                '{he.cap} ~cross the line without looking at it. "{command}" {he} ~shout, and {B} *do as '
                '{B.he} *be told.',
                "all night they ^work side by side. Neither *speak, except to say: hold, pull, and mind the "
                "{tool}.",
            ),
            (
                '"Thank you," *say {B} at {dawn}. It *be the first word in {few_days}.',
                '"You are still wrong," ~say {A}, wringing out {his} {garment}. "I know," *say {B}. '
                '"{food.cap}?"',
                '"What were we quarrelling about?" *ask {B}. "{answer_quarrel.spoken}" ~say {A}, and '
                '{small_deed}.',
            ),
        ),
    ),
    "the dream": Plot(
        titles=("{A}'s dream", "dig at {place}", "the dream of the {thing}", "three nights running"),
        steps=(
            (
                "three nights running {A} ~dream the same dream: that a {thing} *lie buried at {place}.",
                '{A} ~dream of {dream_of}, and of a voice that *say: "Dig at {place}."',
                'one night in {month} a {bird} *speak to {A} in {his} sleep. "Under {place} there is a '
                '{thing}," it *say.',
            ),
            (
                '{he.cap} ~tell {B} the {B.trade}. "{proverb.now}," *say {B}, but {B.he} *lend {him} a '
                'spade.',
                '"Dreams are {bulk}," *say {B}. "{vague.spoken}" ~say {A}, and ~fetch a {tool}.',
                "{B} *laugh so hard that {B.he} *spill {B.his} {drink}. All the same, {B.he} *come along to "
                "watch.",
            ),
            (
                "{A} ~dig {when}. {he.cap} ~find {junk}, then {few} {crop.plural}, then {junk}.",
                "by {hour_word} the hole *be as deep as {B} *be tall. {weather_clause.cap}. No {thing}.",
                "they ^dig by turns. {calm_scene.cap} The heap of {bulk_earth} *grow.",
            ),
            (
                "\"What are you doing?\" *ask {C} the {C.trade}. \"Looking for a {thing},\" ~say {A}. \"How "
                "odd,\" *say {C}. \"I dreamed of one too, but in my dream it was in {A}'s own {indoors}.\"",
                'then {C} the {C.trade} *come by and *shake {C.his} head. "I too had a dream," *say {C}. "A '
                '{thing}, behind the {furniture} on {A.home}. But who believes in dreams?"',
            ),
            (
                "{A} ~run home. Behind the {furniture}, under {few} years of dust, *lie the {thing}.",
                "{A} and {B} ^look at each other, ^drop the spade, and ^run to {A.home}. And there it *be: "
                "the {thing}.",
            ),
            (
                "as for the hole at {place}, it *fill with rain, and the {bird.plural} ^love it.",
                "{A} ~give {C} half of everything, which *be difficult, with one {thing}. {C} *have it on "
                "{weekday.plural}.",
                '"Fill it in," *say {B}. "First I shall sleep on it," ~say {A}.',
            ),
        ),
    ),
    "the noise": Plot(
        titles=(
            "the noise at {place}", "the ghost of {place}", "what {sound_verb} in the night", "{A} sits up",
        ),
        steps=(
            (
                "every night {hour_late} there *be a {noise} at {place}, and nobody *know what *make it.",
                "it *be {B} the {B.trade} who first *hear the {noise} at {place}. It *come {hour_late}, and "
                "then it *stop.",
                "people no longer ^walk past {place} after dark, because of the {noise}.",
            ),
            (
                '"It is a ghost," *say {B}. "It is the wind," *say {C}. "It is neither," ~say {A}, though '
                '{he} ~be not sure.',
                "{B} *nail up a {horseshoe}. {C} *sprinkle {bulk}. The {noise} *come all the same.",
                "some ^say it *be old Captain {lost_captain}, who *go down with the {the_ship}; others "
                "^blame {someone}'s {dish}.",
            ),
            (
                '"I shall sit up," ~say {A}, who ~fear {A.dread} but not ghosts. {he.cap} ~take a lantern, '
                'a {tool} and {food}.',
                "so {front} {A} ~go to {place} alone, with {his} {A.pride} for company.",
                "{A} and {B} ^draw straws, and {A} ~lose. {he.cap} ~be to watch at {place} until dawn.",
            ),
            (
                "ten o'clock. Nothing. Eleven. {thing_clause.cap}. Midnight. {weather_clause.cap}, and {A} "
                "{small_deed}.",
                "{he.cap} ~count {crop.plural} to stay awake. {calm_scene.cap} Then the candle *go out.",
                "for hours there *be only the {sound} of the {water}. {he.cap} ~eat the {food_left}. "
                "{he.cap} {small_deed}.",
            ),
            (
                "and then: the {noise}! {A}'s hair *stand on end. {he.cap} ~lift the lantern, and there *be "
                "{beast_name}, {C}'s {beast}, with {beast_his} head stuck in a {vessel}.",
                "the {noise} *begin {where_close}. {A} ~creep nearer, ~pull aside a {garment}, and ~find "
                "{beast_name} the {beast}, asleep and dreaming, knocking {beast_his} foot against a {tool}.",
                "there *come the {noise}, once, twice. It *be no ghost. It *be {beast_name}, {C}'s {beast}, "
                "rolling a {crop} up and down the floor.",
            ),
            (
                '"Well?" *ask {B} in the morning. "It was a ghost with four feet," ~say {A}.',
                '{A} ~carry {beast_name} home to {C}, who *be {mood}. "{beast_he.cap} has always been '
                '{vice}," *say {C}.',
                "nobody *believe it. For years afterward {B} *say it *be a ghost, and *walk round by "
                "{street}.",
            ),
        ),
    ),
    "the apprentice": Plot(
        titles=("{B} learns to {lesson}", "the third try", "{A}'s pupil", "once more", "a lesson"),
        steps=(
            (
                '"Teach me to {lesson}," *say {B} the {B.trade}. "It takes {few_days}," ~say {A}. "I have '
                'until {meal}," *say {B}.',
                "{B} the {B.trade} *can do many things, but {B.he} *can not {lesson}. So {B.he} *come to "
                "{A}.",
                "for years {B} ~have wanted to {lesson}. {front.cap}, {B.he} *ask {A} for help.",
            ),
            (
                'the first time, {B} *begin too fast, and {small_mishap}. "Once more," ~say {A}.',
                "{B}'s first try *end in the {water}. {A} {small_deed}. \"Once more,\" {he} ~say.",
                'the first time it *go wrong at the start. "{exclaim}," *say {B}. "Once more," ~say {A}.',
            ),
            (
                'the second time, {B} *be too slow, and {small_mishap}. "Once more," ~say {A}.',
                'the second try *be worse than the first: {clause}, and {B} *lose {B.his} temper. "Once '
                'more," ~say {A}.',
                "the second time {C} the {C.trade} *be watching, and {B}'s hands ^shake. \"Once more,\" "
                "~say {A}, and ~send {C} away.",
            ),
            (
                '"I cannot do it," *say {B}. "Nor could I," ~say {A}, "until my {few_th} try. '
                '{proverb.now}."',
                'they ^rest {where} and ^share {food}. {calm_scene.cap} "When I was young," ~say {A}, '
                '"{clause.past}."',
                '{B} {small_deed@B}. "Watch my hands," ~say {A}, "and not my face."',
            ),
            (
                "the third time, {B} *breathe out, *begin {how}, and *do it.",
                "the third time nobody *say anything at all, because nothing *go wrong.",
                "and the third time? The third time {B} *do it as if {B.he} ~have done it all {B.his} life.",
            ),
            (
                '"Once more?" *ask {B}. "No," ~say {A}. "Now teach {C}."',
                '{B} *run {toward} to tell {C} the {C.trade}. {A} {small_deed}, and ~say to {himself}: '
                '"Once more."',
                'now, when children ^ask {B} how to {lesson}, {B.he} *say: "First badly, then slowly, then '
                'well."',
            ),
        ),
    ),
    "the common pot": Plot(
        titles=(
            "the common pot", "{gift1}, {gift2}, {gift3} and {gift4}", "soup for five", "the hungry {season}",
            "{A}'s pot",
        ),
        steps=(
            (
                "it *be a hungry {season}. {A} ~have a pot and a fire, and nothing to put in it but water.",
                "{after_mishap} there *be no market for {few_days}. {A} ~set a pot of water on the fire all "
                "the same.",
                "{front} {A} ~look in {his} cupboard and ~find it empty. {he.cap} ~hang a pot over the fire "
                "and ~open the door.",
            ),
            (
                '{B} the {B.trade} *smell the smoke and *come in. "I have only {gift1}," *say {B}. "Put '
                'them in," ~say {A}.',
                "the first to knock *be {B} the {B.trade}, with {gift1} in {B.his} {garment}. In they ^go.",
            ),
            (
                'next *come {C} the {C.trade}, {mood} and cold, with {gift2}. "They are not much," *say '
                '{C}. "They are {gift2}," ~say {A}, "and that is more than water."',
                "{C} the {C.trade}, who {C.habit@C}, *bring {gift2}. {A} ~stir the pot.",
            ),
            (
                'then {D} the {D.trade} *look in at the window. "Is there room for {gift3}?" There *be.',
                "{D} the {D.trade} ~have been saving {gift3} for {feast}, but {D.he} *give the lot.",
            ),
            (
                "last *come {E} the {E.trade} with {gift4}, and with {E.him} {few} children and a "
                "{animal_adj} {pet}.",
                "and when {E} the {E.trade} *bring {gift4}, {A} ~put on the lid. {calm_scene.cap}",
            ),
            (
                "{gift1}, {gift2}, {gift3} and {gift4}: it *be the best soup that anybody *can remember.",
                "nobody afterward *can say whose soup it *be. {B} *say it *be the {gift1}; {C} the {gift2}; "
                "{D} the {gift3}; {E} the {gift4}.",
            ),
            (
                '"And what did you give?" *ask {E}. "The water," ~say {A}, "and the door."',
                "{A} ~do not wash the pot for a week, because of the smell.",
                "now they ^do it every {season}: {B}, {C}, {D}, {E}, and {A} with the spoon.",
            ),
        ),
    ),
    "the voyage": Plot(
        titles=(
            "{A} goes to {the_port}", "the voyage of the {the_ship}", "{few_days} at sea", "there and home",
        ),
        steps=(
            (
                "{front} {A} ~take passage on the {the_ship}, bound for {the_port}, to sell {part1} "
                "{vessel1} of {bulk1} for {B}.",
                '"Sell my {bulk1} in {the_port}," *say {B} the {B.trade}, "and bring me a {thing}." So {A} '
                '~go aboard the {the_ship} with {part1} {vessel1} of {bulk1}.',
            ),
            (
                "{C} the {C.trade} *wave from {place}. The {ship_part} *creak, the {sea_adj} sea *open, and "
                "Tolver *grow small.",
                "on the first day {A} ~be {mood}; on the second {he} ~be ill; on the third {he} {deed}.",
                "the {the_ship} *sail {compass}. {scene_sea} {A} ~learn to {skill}.",
            ),
            (
                "in the night {weather_sea}. The {ship_part} *break, and {A} ~help to mend it, {how}.",
                "for {few_days} there *be no wind. They ^eat {food}, and then {food}, and then the same "
                "again.",
                "they ^see {few} whales, {few} {bird.plural} and a {vessel_type} with no one on board.",
            ),
            (
                "in {the_port} the streets ^smell of {bulk} and the people {deed_port}. {A} ~sell the "
                "{bulk1} for {price1} pence the {vessel1_one}: {part1} times {price1}, which *be {product1}.",
                '{A} ~stand in the market of {the_port} and ~cry: "{bulk1.cap}! {price1.cap} pence the '
                '{vessel1_one}!" By {hour_word} the {part1} {vessel1} ^be gone, and {he} ~have {product1} '
                'pence.',
            ),
            (
                "with the money {he} ~buy a {thing} for {B}, and for {himself} {load}.",
                "{he.cap} ~find the {thing} in a shop no wider than a {furniture}, and ~pay what they ^ask.",
            ),
            (
                "the way home *be shorter. {C} *see the sail from {place} and *ring the {bell}.",
                "{few_days} later the {the_ship} *come round the Point, and {C} *be there to take the rope.",
            ),
            (
                '"{product1.cap} pence, and here is your {thing}," ~say {A}. {B} {small_deed@B}. "And what '
                'is {the_port} like?" "Like Tolver," ~say {A}, "with different {animal.plural}."',
                "{A} ~give {B} the {thing} and what *be left of the {product1} pence, and ~sleep for a day "
                "and a night on {A.home}.",
            ),
        ),
    ),
}  # fmt: skip

PLOT_PHRASES: dict[str, Step] = {
    "face_colour": ("red", "pale", "white", "scarlet", "pink", "purple"),
    "small_vessel": ("spoonful", "pinch", "handful", "drop", "thimbleful", "dash", "grain"),
    "resolve": ("~resolve", "~decide", "~mean", "~intend", "~choose"),
    "ask_about": ("^ask about", "^laugh about", "^bring up", "^inquire into", "^gossip about"),
    "it_grows": (
        "the {animal} *be bigger", "there *be more {bulk} in it", "it *last longer", "{B} *be braver",
        "the weather *be worse", "it *happen in a different street", "{A} *be more {vice}",
        "fewer people ^believe it",
    ),
    "mood_good": ("grateful", "happy", "relieved", "delighted", "merry", "light-hearted"),
    "hour_word": ("noon", "dusk", "nightfall", "evening", "high water", "low water", "six o'clock", "{meal}"),
    "hour_late": (
        "at midnight", "at one o'clock", "at two o'clock", "in the small hours", "long after dark",
        "past eleven",
    ),
    "few_days": (
        "two days", "three days", "five days", "six days", "a week", "ten days", "nine nights", "a month",
        "two weeks", "a fortnight", "forty days",
    ),
    "few_th": ("third", "fifth", "sixth", "ninth", "tenth", "twentieth", "hundredth"),
    "few_pieces": ("two", "three", "seven", "nine", "twenty", "a hundred", "more than a dozen"),
    "few_rowers": ("five", "six", "seven", "nine"),
    "broken": (
        "too small", "worn out", "at the bottom of the {water}", "eaten by the {animal}", "full of holes",
        "the wrong colour", "stolen", "only borrowed", "good for nothing",
    ),
    "heavy": (
        "heavy", "awkward", "slippery", "hard to carry", "louder than {he} ~like",
        "too {taste} to keep in a pocket", "no use in the rain", "in everybody's way",
    ),
    "birds_in": (
        "the {bird.plural} ^be flying inland", "the {bird.plural} ^sit in rows", "the {fish.plural} ^jump",
        "there *be a ring round the moon", "the {animal.plural} ^will not leave the <barn|yard|house>",
    ),
    "storm_verb": ("*begin", "*break", "*be upon them", "*blow a full gale"),
    "remark_in_storm": (
        '"Louder," *say {C}.', "{weather_clause}.", '"They must hear it," ~say {A}.',
        "Nobody *think of sleep.", "{someone} *bring {drinks}.", "Once, {A} ~think {he} ~see a light.",
    ),
    "answer_tired": (
        "What is for breakfast?", "Have you fed my {pet}?", "Has anyone some {drink}?",
        "Is it {weekday} already?", "We lost the {tool}!", "Who won the {feast_thing}?", "Take this rope!",
    ),
    "courage": (
        "courage", "{month}", "a whole summer", "the sea", "something of its own", "patience", "a tune",
        "wit",
    ),
    "small_deed_kind": (
        "~shake {his} head, ~polish it", "~hold it a moment", "~kiss it once", "~laugh, ~bow",
    ),
    "rain_noun": ("rain", "wind", "snow", "cold", "dark", "fog", "hail"),
    "trade_guess": (
        "pirate", "poet", "tax collector", "lost cousin", "runaway cook", "spy", "duchess", "bell founder",
        "piano tuner", "lawyer", "juggler", "locksmith", "bishop", "dentist", "gambler", "mapmaker",
        "beekeeper",
    ),
    "stranger_deed": (
        "*mend the {mendable}", "*draw {bird.plural} on the {furniture}", "*walk {toward} and back",
        "*play {tune}", "*eat {food} and *pay for it", "*help {someone} to {deed.base@they}", "*sit {where}",
        "*learn the names of the boats", "*write {writable}", "*watch {watchable}",
        "*teach the children to {skill@they}", "*sleep {where}",
    ),
    "stranger_move": (
        "*smile", "*look into the fire", "*put down the {thing}", "*take a long breath", "*stand up", "*nod",
        "*turn to the window", "*laugh", "*say nothing for a while",
    ),
    "age": ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "ninety", "forty-one", "thirty-nine"),
    "never_had": ("~have never had", "~want", "~dream of having", "~have once lost", "~need"),
    "handle": (
        "handle", "lid", "last button", "ribbon", "second coat of paint", "left side", "hinge", "lining",
        "name",
    ),
    "feat": (
        "carry {total} {crop.plural} from {place} to {place2}", "row round the Point with one oar",
        "eat {total} pasties", "climb the signal mast with a {vessel} of {bulk}",
        "walk from {place} to {place2} backwards", "gut {total} herring blindfold",
        "stay silent from breakfast to supper", "knit a {garment}",
        "stack {total} {crop.plural} on a {furniture}", "roll a barrel up Custom House Hill",
    ),
    "his_time": ("a day", "a {garment}", "a good boot", "a quiet afternoon"),
    "his_temper": ("a friend's good opinion", "a temper", "a voice", "an evening"),
    "small_call": (
        "~whistle twice", "~say one word", "~hold out a {crop}", "~ring a small bell", "~clap once",
        "~sneeze",
    ),
    "mishap": (
        "the roof of {B}'s house *fall in", "{B}'s chimney *catch fire", "{B}'s cellar *fill with water",
        "the {tree} *come down on {B}'s door", "{B}'s {pet} *fall into the well", "{B}'s boat *slip its rope",
        "the wall of {B}'s {indoors} *give way",
    ),
    "mishap_A": (
        "the roof of {his} {indoors} *fall in", "{his} {pet} *eat the {crop.plural}",
        "the {ship_part} of {his} boat *break", "{his} chimney *catch fire", "somebody *steal {his} {tool}",
        "the price of {bulk} *fall", "the cellar *fill with water",
    ),
    "small_mishap": (
        "the {tool} *fly {toward}", "there *be {bulk} on the ceiling", "{B.he} *sit down in the {bulk}",
        "the {crop} *roll away {toward}", "the {pet} *hide {where}", "{B.his} thumb *turn {colour}",
        "the {crop} *break in two", "{someone} *laugh", "the {washable} *never be the same again",
        "it all ^end in a {sound}",
    ),
    "after_mishap": (
        "after the great frost", "after the flood", "after three weeks of fog", "after the bridge *fall",
        "after the fire at {landmark}", "after the herring ^fail to come", "after a storm from the {compass}",
    ),
    "dawn": ("dawn", "sunrise", "breakfast", "first light", "six o'clock", "the end"),
    "answer_quarrel": (
        "I forget.", "I think it was a {tool}.", "Something to do with {bulk}.",
        "You were wrong, I know that.", "Let us not begin again.", "It will come back to me.",
    ),
    "bulk_earth": ("sand", "gravel", "clay", "stones", "earth", "mud", "shingle"),
    "noise": (
        "knocking", "moaning", "scratching", "rattling", "humming", "dragging of chains", "wailing",
        "thumping", "tapping",
    ),
    "sound_verb": ("knocked", "moaned", "scratched", "walked", "rattled", "hummed", "wailed", "tapped"),
    "lost_captain": ("Morley", "Dredge", "Haddon", "Pym", "Skillet", "Orrin", "Bracken", "Thule"),
    "horseshoe": (
        "horseshoe", "bunch of garlic", "{material} {trinket}", "{bird} feather", "page of a hymn book",
    ),
    "food_left": ("last of the {dish}", "{dish}", "crust in {his} pocket", "apple core"),
    "where_close": (
        "behind the door", "overhead", "under the floor", "at {his} very feet", "in the next room",
        "in the cupboard",
    ),
    "weather_sea": (
        "the wind *rise to a gale", "a wave *sweep the deck", "the fog *close in",
        "lightning *strike the mast", "they ^run upon a sandbank", "the anchor *drag",
        "the {ship_part} *take fire",
    ),
    "scene_sea": (
        "The cook *burn the {dish}.", "A {bird} *follow for {few} miles.",
        "There *be {fish.plural} in the nets.", "{calm.cap}.",
        "A {vessel_type} *pass, bound for {port}.", "{weather_clause.cap}.",
    ),
    "deed_port": (
        "^walk on stilts", "^keep {bird.plural}", "^eat {dish} for breakfast", "^never say please",
        "^wear {colour} {garment.plural}", "^sleep until noon", "^bow to {animal.plural}",
        "^pay in {crop.plural}", "^paint their doors {colour}",
    ),
}  # fmt: skip
