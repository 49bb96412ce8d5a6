"""The words of Tolver, sorted by what may be said of them. Lists only; `phrases` puts them together."""

from english import listed

WORDS: dict[str, tuple[str, ...]] = {
    # Things
    "tool": listed("""hammer, chisel, mallet, awl, rasp, handsaw, spokeshave, adze, trowel, spade, rake,
        hoe, ladle, skillet, whetstone, bodkin, marlinspike, paintbrush, ruler, boat hook, oar, winch,
        pulley, crowbar, pickaxe, shovel, broom, mop, bucket, sieve, rolling pin, bread knife, griddle,
        kettle, teapot, ladder, wheelbarrow, lantern, spyglass, compass, hourglass, slate, inkwell,
        penknife, candlestick, corkscrew, grindstone, hatchet, crook, churn, bellows pump, butter
        paddle, fishing rod, lobster pot, saddle, bridle, horseshoe, weathervane, abacus, gimlet,
        sickle, scythe, pitchfork, watering can, coal scuttle, poker, toasting fork, nutcracker,
        umbrella, walking stick, sea chest, hatbox, footstool, rocking chair"""),
    "trinket": listed("""ring, locket, thimble, button, whistle, snuffbox, key, pocket watch, medal,
        spoon, bracelet, brooch, buckle, chess piece, doll, flute, music box, hand bell, seal, comb,
        mirror, marble, bead, pipe, matchbox, hatpin, cup, egg cup, napkin ring, letter opener, die,
        candle snuffer, bookmark, needle case, anklet, figurehead, toy boat, toy horse, spinning top,
        tuning fork, inkstand, knitting needle"""),
    "material": listed("""brass, pewter, copper, oak, walnut, iron, silver, tin, bone, glass, clay,
        ivory-white, slate, willow, birch, amber, horn, pearl, cedar, ebony, bronze, steel, cork, coral,
        jade, applewood, whalebone, crystal, porcelain, nickel, soapstone"""),
    "thing_adj": listed("""old, new, small, heavy, crooked, battered, borrowed, favourite, rusty,
        painted, polished, worn, handsome, plain, second-best, spare, sturdy, dented, little, chipped,
        stolen, forgotten, dusty, splendid, clumsy, useless, precious, lucky, scratched, ugly, dainty,
        foreign, enormous, homemade, well-oiled, broken, secondhand, curious, odd, expensive, cheap,
        faithful"""),
    "vessel": listed("""basket, barrel, jar, sack, crate, bucket, tub, jug, bowl, pail, hamper, cask,
        tray, pot, bag, box, tin, keg, trunk, pan, chest, saucepan, washtub, bottle, flask, drum, vat"""),
    "measure": listed("""cartload, bushel, barrowful, boatload, peck, hundredweight, spoonful, pound,
        shipload"""),
    "bulk": listed("""flour, salt, onions, turnips, apples, coal, sand, nails, feathers, wool, oysters,
        mussels, cockles, herring, eels, shrimps, sprats, barley, oats, peas, beans, potatoes, pears,
        plums, damsons, cherries, walnuts, chestnuts, honey, treacle, lard, butter, tallow, tar, pitch,
        vinegar, cider, milk, whey, cream, eggs, buns, biscuits, candles, soap, starch, straw, hay,
        sawdust, peat, driftwood, kindling, gravel, lime, clay, tea, coffee, pepper, ginger, cloves,
        mustard, raisins, figs, dates, lemons, oranges, rags, buttons, letters, hymn books, cabbages,
        carrots, parsnips, leeks, radishes, gooseberries, blackberries, seaweed, pebbles, shells, rope
        ends, corks, fish heads, kippers, pickles, jam, mint, lavender, nettles"""),
    "crop": listed("""apple, pear, plum, onion, turnip, cabbage, carrot, parsnip, leek, radish, potato,
        lemon, orange, egg, loaf, bun, biscuit, pie, pasty, cheese, herring, mackerel, kipper, oyster,
        crab, lobster, eel, candle, button, nail, hinge, brick, tile, bottle, cork, plate, saucer, cup,
        tankard, jug, basket, crate, rope, net, float, hook, oar, plank, barrel, blanket, shirt,
        stocking, mitten, scarf, apron, ribbon, letter, parcel, hymn book, pencil, goose, hen, duck,
        rabbit, pigeon, sheep, pumpkin, marrow, quince, walnut, chestnut, beetroot, cucumber, pancake,
        dumpling, lantern, bead, pebble, shell, feather"""),
    "bundle": listed("""bundle, armful, coil, roll, heap, stack, handful, pocketful, fistful, apronful,
        barrowload"""),
    "strand": listed("""rope, twine, canvas, linen, driftwood, willow rods, sailcloth, ribbon, reeds,
        kindling, straw, old newspapers, wet washing, netting, chain, leather straps, hemp, yarn,
        calico, oakum, rushes, bracken, rhubarb, seaweed, lavender, parsley, holly, nettles, leeks,
        candles, letters, hazel sticks"""),
    "garment": listed("""coat, shawl, scarf, waistcoat, apron, jersey, cap, bonnet, glove, stocking,
        cloak, petticoat, collar, nightshirt, handkerchief, sou'wester, belt, mitten, boot, slipper,
        shirt, gown, jacket, hat, hood, smock, kerchief, dressing gown"""),
    "colour": listed("""red, blue, green, yellow, grey, brown, white, black, scarlet, purple, orange,
        pink, crimson, cream, russet, indigo, mustard-yellow, sea-green, sky-blue, rust-red, lilac,
        olive, tawny, striped, spotted, checked"""),
    "furniture": listed("""table, bench, dresser, cupboard, shelf, chair, stool, settle, bed, cradle,
        desk, counter, wardrobe, mantelpiece, washstand, sideboard, bookcase, piano, trestle, sofa"""),
    "mendable": listed("""torn net, cracked jug, loose shutter, broken chair, leaking boat, split oar,
        garden gate, stuck clock, bent hinge, frayed rope, garden fence, chapel roof, worn boot,
        punctured bellows, snapped mast, wobbling table, rotten step, dripping tap, squeaking pump,
        lopsided cart, smashed window, burst pipe, old accordion, weathercock, crab pot, puppet, kite,
        rocking horse, umbrella, bootlace"""),
    "washable": listed("""shirt, tablecloth, floor, doorstep, window, cup, saucepan, blanket, curtain,
        apron, shop front, boat, hull, cobblestone, flagstone, dog, slate, wagon, teapot, bedsheet,
        smock, staircase, counter"""),
    "readable": listed("""a letter, the newspaper, an old almanac, a book about whales, the tide table,
        a recipe, the label, a list of names, a poem, the notice, a will, a chapter of history, the
        shipping news, a map, a book about bees, the rules of cribbage, a ghost story, the ledger, a
        telegram, a seed catalogue"""),
    "writable": listed("""a letter, a long list, a complaint, a poem, an invitation, a bill, a recipe, a
        receipt, a note, an apology, a warning, a report, a song, a speech, a riddle, a petition, a
        label, a diary"""),
    "watchable": listed("""the tide, the gulls, the boats, the rain, the lamplight, the clouds, the
        crowd, the fire, the dancers, the cormorants, the horizon, the swallows, the cranes at work, the
        ducks, the kettle, the sunset, the fog, the snow, the ferry, the seals, the lighthouse beam, the
        moon, the sheep on the hill"""),
    # Food and drink
    "food": listed("""onion soup, fish pie, bread and butter, a boiled egg, cold mutton, cheese on
        toast, apple dumplings, pea soup, a baked potato, plum cake, pickled herring, oat porridge, a
        mutton pasty, cockles and vinegar, gingerbread, rabbit stew, rice pudding, leek broth, smoked
        eel, honey cake, pancakes, a slice of ham, stewed prunes, rye bread, a bowl of mussels, treacle
        tart, a bacon roll, custard, chestnut stuffing, a cucumber sandwich, cauliflower cheese,
        buttered parsnips, crab cakes, turnip mash, roast chicken, bean salad, mushroom toast, raisin
        buns, marmalade, oatcakes, toffee, seed cake, a ripe pear, walnut bread"""),
    "stirrer": listed("spoon, ladle, paddle, fork, stick, whisk, oar, candle, rolling pin"),
    "drink": listed("""tea, cider, hot milk, ginger beer, barley water, coffee, cocoa, elderflower wine,
        small beer, mulled ale, lemonade, mint tea, buttermilk, soup, nettle beer, blackcurrant cordial,
        plum brandy, spring water"""),
    "cup": listed("cup, mug, tankard, glass, jug, bowl, flask, thimbleful, beaker, saucer"),
    "dish": listed("""fish pie, onion soup, barley broth, plum cake, oat biscuits, crab cakes, leek
        tart, apple dumplings, rabbit stew, cockle chowder, rye bread, gingerbread, treacle pudding,
        pickled cabbage, bean stew, mutton pasties, pancakes, chestnut soup, rhubarb crumble, potato
        cakes, blackberry jam, quince cheese"""),
    "contest_dish": listed("""fish pie, onion soup, barley broth, plum cake, leek tart, treacle pudding,
        bean stew, gingerbread, chestnut soup, rhubarb crumble, cockle chowder, apple tart, seed cake,
        custard, rabbit stew, crab soup"""),
    "taste": listed("""salty, sweet, sour, burnt, bitter, peppery, smoky, stale, delicious, bland,
        buttery, fishy, gingery, mild, sharp, strange, lumpy, watery, crisp, rich"""),
    "meal": listed("breakfast, supper, dinner, tea, lunch, elevenses"),
    # Creatures
    "animal": listed("""cat, dog, goat, donkey, goose, hen, pig, pony, rabbit, fox, badger, hedgehog,
        otter, seal, mouse, rat, toad, sheep, cow, calf, cockerel, ferret, mole, squirrel, hare,
        tortoise, parrot, magpie, kitten, puppy, duck, lamb, crab, monkey, weasel, frog"""),
    "pet": listed("""cat, dog, goat, donkey, goose, hen, pig, pony, kitten, ferret, parrot, tortoise,
        magpie, jackdaw, lamb, puppy, cockerel, duck, monkey, piglet, calf, ram, terrier, hound"""),
    "pet_name": listed("""Pepper, Button, Admiral, Biscuit, Thimble, Duchess, Mustard, Captain, Nettle,
        Pudding, Bramble, Tuppence, Socks, Parsley, Bishop, Cinder, Marrow, Juniper, Sixpence, Dumpling,
        Whisper, Treacle, Major, Clover, Rumpus, Velvet, Pickle, Barnacle, Teapot, Hazel"""),
    "animal_adj": listed("""fat, thin, lame, sleepy, greedy, one-eyed, bad-tempered, wet, hungry, muddy,
        silent, proud, tame, elderly, spotted, nervous, cheerful, shaggy, ginger, white-footed,
        stubborn, runaway, lost, noisy"""),
    "bird": listed("""gull, heron, cormorant, swallow, curlew, crow, rook, sparrow, starling, robin,
        wren, tern, puffin, oystercatcher, plover, pigeon, jackdaw, owl, gannet, kittiwake, swift,
        thrush, blackbird, goose, swan, magpie, lark, sandpiper, wagtail, kingfisher"""),
    "fish": listed("""herring, cod, mackerel, haddock, plaice, sole, eel, pollock, bream, mullet,
        whiting, ling, skate, turbot, sprat, pilchard, salmon, trout, bass, halibut, gurnard, flounder"""),
    "bug": listed("""moth, beetle, wasp, bee, spider, snail, ladybird, cricket, earwig, gnat,
        grasshopper, slug, ant"""),
    # The town and the country round it
    "landmark": listed("""the fish market, the old crane, the chapel, the net loft, the rope works, the
        Blue Anchor, the Custom House, the sea wall, the signal mast, the lime kiln, the dry dock, the
        duck pond, the tide mill, the weighbridge, the lifeboat shed, the clock tower, the town pump,
        the almshouses, the bakehouse, the forge, the lighthouse, the school, the post office, the coal
        wharf, the salt pans, the toll gate, the ferry steps, the orchard, the quarry, the stepping
        stones, the bandstand, the cattle trough, the watch house, the timber yard, the pottery, the
        glassworks, the library, the smokehouse, the boatyard, the wash house, the market cross, the
        pilot station, the chandlery, the allotments, the old gallows post, the oyster beds, the
        turnpike, the shepherd's hut, the bowling green, the ice house"""),
    "street": listed("""Lamp Lane, Gull Steps, Net Street, Anchor Yard, Chapel Row, Fish Cross, Minute
        Court, Bramble Path, Thimble Street, Wool Quay, Cod End, Barrel Lane, Mill Hill, Canvas Lane,
        Kiln Lane, Quarry Road, Rope Walk, Soap Alley, Slip Lane, Point Road, Shingle Row, Forge Corner,
        Ditch Road, Custom House Hill"""),
    "indoors": listed("""kitchen, parlour, cellar, attic, pantry, workshop, loft, stable, scullery, back
        room, taproom, schoolroom, dairy, washhouse, woodshed, bakehouse, belfry, storeroom, hayloft,
        vestry, hallway, cabin, greenhouse, counting house, sail loft, henhouse"""),
    "under_spot": listed("""table, bed, stairs, counter, bridge, upturned boat, floorboards, doormat,
        haystack, oilcloth, pear tree, jetty, hedge, flagstone, sink, bench, old sail, washtub,
        staircase, lamp post, hen coop, cabbage leaves, woodpile, tarpaulin, market stall"""),
    "on_spot": listed("""quay, roof, windowsill, doorstep, beach, jetty, sandbank, garden wall,
        mantelpiece, hill, slipway, deck, kitchen table, bench, ferry, cliff path, bridge, upper shelf,
        shingle, gatepost, chapel steps, village green, harbour railing, staircase, coal heap, shop
        counter, top step, cart"""),
    "in_spot": listed("""harbour, garden, orchard, market, churchyard, long grass, fog, rain, shade,
        doorway, boat, narrow lane, reeds, dunes, back yard, ditch, turnip field, well, coal cellar, old
        barrel, laundry basket, hen run, hollow tree, rowing boat, flower bed, window seat, wheelbarrow,
        kindling box, fishing boat"""),
    "port": listed("""Brack, Osmouth, Pennard, Lunt, Corran, Hale Sound, Skerrin, Dunmoor, Little Holm,
        Vexley, Saint Orrin, Kettleness, Farrow, Quill Bay, Ardle, Northwick"""),
    "ship": listed("""Patient Anna, Grey Heron, Second Thought, Morning Bell, Salt Sister, Juniper,
        Brave Intention, Widow's Candle, Early Riser, Ninth Wave, Golden Turnip, Quiet Margaret, Zephyr,
        Humble Pie, Northern Lamp, Good Enough, Silver Sprat, Perhaps"""),
    "vessel_type": listed("""brig, schooner, sloop, ketch, lugger, barge, cutter, trawler, yawl,
        collier, ferry, smack"""),
    "ship_part": listed("""mast, rudder, bowsprit, keel, anchor, foresail, tiller, hatch, capstan,
        windlass, jib, rigging, boom, topsail, cabin, galley, hold, deck, bilge pump, figurehead"""),
    "tree": listed("""oak, elm, willow, pear tree, apple tree, yew, hawthorn, ash, holly, plum tree,
        walnut tree, birch, alder, chestnut, hazel, sycamore, rowan, fig tree"""),
    "flower": listed("""rose, marigold, daisy, poppy, foxglove, primrose, thrift, sea holly, hollyhock,
        sweet pea, snowdrop, tulip, lavender, bluebell, geranium, dahlia, violet, buttercup, harebell,
        pansy"""),
    "bell": listed("""chapel bell, noon bell, school bell, fog bell, harbour bell, ship's bell, dinner
        bell, shop bell"""),
    "water": listed("""sea, tide, harbour, river, stream, estuary, millpond, channel, bay, marsh, rock
        pool, horse trough"""),
    # Time and weather
    "weekday": listed("Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday"),
    "daypart": listed("morning, afternoon, evening, night"),
    "month": listed("""January, February, March, April, May, June, July, August, September, October,
        November, December"""),
    "season": listed("spring, summer, autumn, winter"),
    "feast": listed("""Lantern Night, Herring Fair Day, Rope Day, the Feast of Boats, Bell Sunday, Apple Day,
        the Feast of Nets, Candle Eve, Sheep Fair Day, Low Tide Day, Kite Monday, Harvest Day"""),
    "weather_adj": listed("""cold, warm, wet, windy, foggy, clear, grey, bright, frosty, mild, stormy,
        dull, damp, golden, sultry, blustery, snowy, misty, drizzly, breathless, moonlit, rainy, still,
        raw"""),
    "wind_verb": listed("""*blow, *howl, *moan, *whistle, *rise, *drop, *shift, *grumble, *roar, *sigh,
        *hiss, *turn, *freshen"""),
    "compass": listed("north, south, east, west, north-east, north-west, south-east, south-west"),
    "sky_adj": listed("""pale, low, heavy, torn, purple, golden, empty, bruised, silver, copper,
        cloudless, yellow, milky, ashen, speckled, pearly, black, clear"""),
    "sea_adj": listed("""grey, flat, choppy, green, restless, calm, heavy, white-capped, glassy, sullen,
        blue, oily, wild, sleepy, glittering, brown, milky, lazy, angry, wrinkled"""),
    # People's minds and manners
    "mood": listed("""happy, sad, angry, tired, proud, ashamed, curious, afraid, cheerful, lonely,
        jealous, calm, puzzled, hungry, hopeful, uneasy, relieved, foolish, grateful, stubborn,
        restless, bored, anxious, delighted, thoughtful, suspicious, gloomy, cross, brave, sleepy,
        impatient, merry, bewildered, content, weary, shy, homesick, disappointed, surprised, guilty,
        determined, doubtful, light-hearted, offended, peaceful"""),
    "feeling": listed("""joy, grief, anger, pride, shame, relief, doubt, patience, envy, hope, pity,
        fear, courage, delight, care, gratitude, suspicion, wonder, regret, good humour, dignity, scorn,
        kindness, annoyance, tenderness, haste, interest, surprise, contentment, longing"""),
    "manner": listed("""slowly, quietly, carefully, eagerly, sadly, proudly, gently, loudly, politely,
        wearily, quickly, calmly, crossly, kindly, sternly, softly, bravely, nervously, cheerfully,
        gravely, lazily, patiently, suddenly, thoughtfully, clumsily, neatly, gladly, boldly, shyly,
        briskly, grimly, merrily, stubbornly, anxiously, hopefully, solemnly, secretly, stiffly,
        gratefully, fondly, warily, absently, firmly, sweetly"""),
    "say_verb": listed("""~say, ~answer, ~reply, ~whisper, ~mutter, ~cry, ~call, ~murmur, ~grumble,
        ~announce, ~shout, ~explain, ~insist, ~admit, ~sigh, ~declare, ~grunt, ~laugh, ~remark, ~agree,
        ~add, ~warn, ~suggest"""),
    "warm_feeling": listed("""love, gratitude, hope, delight, patience, good humour, longing, affection,
        tenderness, respect, good wishes, kindness"""),
    "virtue": listed("""honest, patient, generous, careful, clever, kind, loyal, punctual, modest,
        thrifty, brave, sensible, tidy, humble, steady, truthful, sober, gentle, diligent, even-tempered"""),
    "vice": listed("""greedy, lazy, vain, careless, rude, idle, sly, mean, boastful, foolish, stubborn,
        nosy, forgetful, clumsy, gloomy, noisy, spiteful, slow, fussy, reckless"""),
    "body": listed("""hand, head, knee, elbow, shoulder, nose, ear, chin, foot, thumb, wrist, back,
        ankle, heel, cheek, finger, forehead, neck"""),
    "ailment": listed("""cough, sore throat, toothache, fever, sprained ankle, headache, chilblain,
        earache, stiff neck, bad back, cold, hiccup, rash, burnt thumb, limp, blister, swollen knee, cut
        finger"""),
    "topic": listed("""the weather, the price of {bulk}, the new {tool}, the harbour dues, {feast}, the
        {feast_thing}, the missing {trinket}, the wreck, the {weather_adj} {season}, the {ailment}, old
        times, the ghost, the wedding, the {vessel_type} from {port}, the bridge, {someone}, the leak,
        the flood, the moon, the school, the trouble with the {animal.plural}, the {colour} {garment},
        the way to {port}, {port}, the rats"""),
    "feast_thing": listed("""dancing, fireworks, supper, procession, regatta, raffle, pie stall, choir,
        bonfire, puppet show, greasy pole, brass band, tug of war, cake contest, lantern parade, rowing
        race"""),
    "abstraction": listed("""luck, time, sleep, hope, patience, love, trouble, wisdom, silence, hunger,
        memory, work, rest, debt, truth, gossip, friendship, courage, pride, weather, youth, age,
        fortune, sorrow, laughter, thrift"""),
    "skill": listed("""tie a bowline, bake bread, swim, read a chart, whistle, mend a net, row in a
        straight line, milk a goat, spell, sharpen a scythe, dance a reel, gut a herring, light a damp
        fire, skim stones, play the fiddle, keep a secret, add up in {his} head, blow glass, throw a
        pot, shear a sheep, shoe a horse, hem a sheet, make soup, paint a straight line, splice a rope,
        steer by the stars, carve a spoon, keep bees, knit a sock, predict rain, catch eels, judge a
        cheese"""),
    "lesson": listed("""whistle, swim, tie a bowline, mend a net, bake a loaf, skim stones, splice a
        rope, milk a goat, dance the reel, throw a pot, shear a sheep, gut a herring, row straight,
        carve a spoon, knit a sock, play the fiddle, juggle, blow a glass ball, shoe a horse, ride a
        donkey, steer a boat, light a damp fire"""),
    "soup_gift": listed("""onions, turnips, leeks, carrots, beans, parsnips, cockles, fish heads,
        mushrooms, potatoes, cabbages, peas, nettles, lentils, mussels, beetroots, herbs, dumplings,
        chestnuts, oats, radishes, shrimps"""),
    "present": listed("""rocking chair, lantern, quilt, kite, music box, footstool, clock, birdcage,
        model boat, writing desk, chess set, cradle, weathervane, walking stick, sea chest, bookcase,
        cloak, puppet, fiddle case, garden seat, map of the coast, pair of boots, set of spoons"""),
    "tune": listed("""a hymn, a jig, a reel, a lullaby, the same three notes, a march, an old rowing
        song, a waltz, a tune without a name, a hornpipe, a song about {animal.plural}, a love song, a
        scale, a round"""),
    "sound": listed("""creak, rattle, splash, whisper, thump, whistle, clatter, groan, jingle, rumble,
        squeak, hiss, scrape, knock, murmur, crash, bark, crackle, drip, tapping"""),
    "junk": listed("""a bent nail, string, a crust, two corks, sand, an old receipt, a fish hook, a
        hole, half a biscuit, a button, a damp handkerchief, a walnut shell, a stub of chalk, three
        dried peas, a feather, a pebble"""),
    "promise": listed("""to come back before {meal}, never to mention it again, to pay on {weekday}, to
        bring {load}, to return the {tool}, to be more careful, to tell nobody, to write every week, to
        keep the {pet} indoors, to mend it by {weekday}, to behave, to stop singing, to try again in
        {season}, to leave the gate shut"""),
    "dream_of": listed("""flying over {landmark}, {food}, a house made of {bulk}, a talking {animal}, a
        {vessel_type} with {colour} sails, drowning in {bulk}, dancing with {someone}, an endless
        staircase, {port}, being a {bird}, a {material} {trinket}, snow in {month}, a {animal} as big as
        a {vessel_type}, the bottom of the sea"""),
}  # fmt: skip
