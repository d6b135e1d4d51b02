//! Tests files with several errors, each of which must be reported.

use crate::{Config, ConfigError};

/// Returns the line and the key of each error.
fn places(text: &str) -> Vec<String> {
    let Err(ConfigError::Mistakes(mistakes)) = Config::parse(text, "f") else { panic!("accepted: {text}") };
    let place = |line: &String| line.split(": ").take(2).collect::<Vec<_>>().join(" ");
    mistakes.iter().map(place).collect()
}

#[test]
fn unknown_key_hides_no_other_mistake() {
    let text = "[[card]]\nname = \"card0\"\nkind = \"simgpu\"\nchannel = 3\nbar1_mib = 17\nvram_mib = 512\n\
                [[vm]]\nname = \"a b\"\ncard = \"card0\"\nwram = 1\nvram_mib = 1024\n\
                [[vm]]\nname = \"c\"\ncard = \"card9\"\nvram_mib = 64\n";
    assert_eq!(
        places(text),
        [
            "f:4:1 card[0].channel",
            "f:5:12 card[0].bar1_mib",
            "f:8:8 vm[0].name",
            "f:10:1 vm[0].wram",
            "f:11:12 vm[0].vram_mib",
            "f:14:8 vm[1].card"
        ]
    );
    let text =
        "[daemon]\nsocket_dirs = \"/x\"\npage = \"1.2.3.4:5\"\n[[vm]]\nname = \"-\"\ncard = \"x\"\nvram_mib = 64\n";
    assert_eq!(places(text), ["f:2:1 daemon.socket_dirs", "f:3:8 daemon.page", "f:5:8 vm[0].name", "f:6:8 vm[0].card"]);
}

#[test]
fn unknown_keys_of_profiles_hide_no_mistake_of_vms() {
    let text = "[[card]]\nname = \"card0\"\nkind = \"simgpu\"\n\
                [[profile]]\nname = \"p\"\nvram_mib = 64\nwait = 3\n\
                [[vm]]\nname = \"a\"\ncard = \"card0\"\nprofile = \"p\"\nchannels = 900\n\
                [[vm]]\nname = \"b/\"\ncard = \"card0\"\nprofile = \"q\"\n";
    assert_eq!(
        places(text),
        ["f:7:1 profile[0].wait", "f:12:12 vm[0].channels", "f:14:8 vm[1].name", "f:16:11 vm[1].profile"]
    );
}

#[test]
fn wrong_type_hides_only_its_consequences() {
    // Sizes depend on the card's size; names, sockets and channels do not.
    let text = "[[card]]\nname = \"card0\"\nkind = \"simgpu\"\nvram_mib = \"big\"\nbar3_mib = 3\n\
                [[vm]]\nname = \"a b\"\ncard = \"card0\"\nvram_mib = 4096\nchannels = 0\nsocket = \"a.sock\"\n";
    assert_eq!(
        places(text),
        [
            "f:4:12 card[0].vram_mib",
            "f:5:12 card[0].bar3_mib",
            "f:7:8 vm[0].name",
            "f:10:12 vm[0].channels",
            "f:11:10 vm[0].socket"
        ]
    );
    let text = "[[card]]\nname = \"card0\"\nkind = \"simgpu\"\n\
                [[vm]]\nname = \"a b\"\ncard = \"card0\"\nvram_mib = true\nmode = 7\ntime.weight = 0\n";
    assert_eq!(places(text), ["f:5:8 vm[0].name", "f:7:12 vm[0].vram_mib", "f:8:8 vm[0].mode", "f:9:1 vm[0].time"]);
}

#[test]
fn tables_that_are_left_out_keep_the_numbers_of_others() {
    let text = "[[card]]\nname = \"card0\"\nkind = \"simgpu\"\n[[card]]\nname = \"card1\"\nkind = 7\n\
                [[card]]\nname = \"card2\"\nkind = \"simgpu\"\nbar1_mib = 5\n\
                [[vm]]\ncard = \"card0\"\nvram_mib = 64\n\
                [[vm]]\nname = \"b\"\ncard = \"card1\"\nvram_mib = 64\nchannels = 0\n\
                [[vm]]\nname = \"b\"\ncard = \"card0\"\nvram_mib = 64\n";
    assert_eq!(
        places(text),
        [
            "f:6:8 card[1].kind",
            "f:10:12 card[2].bar1_mib",
            "f:11:1 vm[0]",
            "f:18:12 vm[1].channels",
            "f:20:8 vm[2].name"
        ]
    );
}

#[test]
fn broken_line_hides_no_other_mistake() {
    let text = "[daemon]\nlog = = \"info\"\npage = \"1.2.3.4:5\"\n\
                [[card]]\nname = \"card0\"\nkind = \"simgpu\"\nkind = \"simgpu\"\nbar1_mib = 17\nbar3 = \"x\n";
    assert_eq!(
        places(text),
        [
            "f:2:7 extra `=`, expected nothing",
            "f:3:8 daemon.page",
            "f:7:1 duplicate key",
            "f:8:12 card[0].bar1_mib",
            "f:9:10 invalid basic string, expected `\"`"
        ]
    );
    // After an unparsable header, the following keys could belong to any table.
    let found = places("[[card]\nname = \"card0\"\nkind = 3\n");
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].starts_with("f:1:"), "{found:?}");
}
