use super::*;

const CARD: &str = "[[card]]\nname = \"card0\"\nkind = \"simgpu\"\nvram_mib = 512\nreserve_mib = 32\n";

/// Returns the errors in a configuration file named `f`.
fn mistakes(text: &str) -> Vec<String> {
    match Config::parse(text, "f") {
        Err(ConfigError::Mistakes(mistakes)) => mistakes,
        Err(other) => vec![other.to_string()],
        Ok(_) => panic!("accepted: {text}"),
    }
}

/// Returns the only error in a configuration file named `f`.
fn mistake(text: &str) -> String {
    let mistakes = mistakes(text);
    assert_eq!(mistakes.len(), 1, "{mistakes:?}");
    mistakes.into_iter().next().unwrap_or_default()
}

fn with_vm(vm: &str) -> String {
    format!("{CARD}[[vm]]\n{vm}")
}

#[test]
fn admin_socket_defaults_to_daemon_user_only() {
    let config = Config::parse(CARD, "f").unwrap();
    assert_eq!((config.daemon.admin_mode, config.daemon.admin_group), (SocketMode(0o600), None));
    assert_eq!(config.daemon.read_socket, None, "there is no read-only socket by default");
}

#[test]
fn full_example_is_read() {
    let text = r#"
        [daemon]
        admin_socket = "/run/m/admin.sock"
        admin_mode = "0600"
        admin_group = "kvm"
        socket_dir = "/run/m"
        log = "info,mediator=debug"
        log_format = "json"

        [[card]]
        name = "card0"
        kind = "simgpu"
        vram_mib = 1024
        bar1_mib = 64
        bar3_mib = 32
        chunk_kib = 128
        profile = true
        [card.time]
        copy_mib_per_s = 4096
        launch_ns = 5000
        switch_ns = 20000
        shader_mhz = 700
        shader_mib_per_s = 50000
        bus_mib_per_s = 6000

        [[card]]
        name = "card1"
        kind = "simgpu"

        [[vm]]
        name = "a"
        card = "card0"
        vram_mib = 256
        channels = 16
        apertures = "remapped"
        socket = "/run/m/vm-a"
        mode = "0600"
        owner = "root"
        group = "kvm"

        [[vm]]
        name = "b"
        card = "card1"
        passthrough = true
    "#;
    let config = Config::parse(text, "f").unwrap();
    assert_eq!(config.daemon.admin_mode, SocketMode(0o600));
    assert_eq!(config.daemon.log_format, LogFormat::Json);
    let time = config.cards[0].time.unwrap();
    assert_eq!((time.switch_ns, time.shader_mhz, time.shader_mib_per_s), (20000, 700, 50000));
    assert_eq!(time.bus_mib_per_s, 6000);
    assert!(config.cards[0].profile && !config.cards[1].profile);
    assert_eq!(config.cards[1].vram_mib, 1024);
    assert_eq!(config.vms[0].socket_path(&config.daemon.socket_dir), Path::new("/run/m/vm-a"));
    assert_eq!(config.vms[1].socket_path(&config.daemon.socket_dir), Path::new("/run/m/b.sock"));
    assert!(config.vms[1].passthrough);
    assert_eq!(config.vms[1].channels(), DEFAULT_CHANNELS);
}

#[test]
fn empty_file_is_a_daemon_without_cards() {
    assert_eq!(Config::parse("", "f").unwrap(), Config::default());
}

#[test]
fn missing_file_names_the_path_and_the_option() {
    let error = Config::load(Path::new("/nonexistent/m.toml")).unwrap_err().to_string();
    assert!(error.contains("/nonexistent/m.toml") && error.contains("--config"), "{error}");
}

#[test]
fn broken_syntax_names_line_and_column() {
    assert_eq!(mistake("[daemon]\nlog = = \"info\"\n").split(": ").next(), Some("f:2:7"));
}

#[test]
fn unknown_key_names_line_key_and_the_known_ones() {
    let text = mistake("[daemon]\nlog = \"info\"\nadmin_sock = \"/x\"\n");
    assert!(text.starts_with("f:3:1: daemon.admin_sock: unknown key `admin_sock`, expected one of"), "{text}");
    assert!(text.contains("`admin_socket`"), "{text}");
}

#[test]
fn unknown_table_is_named() {
    let text = mistake("[[vms]]\nname = \"a\"\n");
    assert!(text.starts_with("f:1:3: vms: unknown key `vms`, expected one of `daemon`, `card`, `vm`"), "{text}");
}

#[test]
fn wrong_type_names_line_key_and_the_expected_type() {
    let text = mistake(&with_vm("name = \"a\"\ncard = \"card0\"\nvram_mib = \"lots\"\n"));
    assert_eq!(
        text,
        "f:9:12: vm[0].vram_mib: `lots` is not a size, expected a number of MiB, or one with M or G, such as 20G"
    );
    let text = mistake(&with_vm("name = \"a\"\ncard = \"card0\"\nvram_mib = 64\nchannels = \"lots\"\n"));
    assert_eq!(text, "f:10:12: vm[0].channels: invalid type: string \"lots\", expected u32");
}

#[test]
fn negative_number_names_the_key() {
    let text = mistake(&with_vm("name = \"a\"\ncard = \"card0\"\nvram_mib = -1\n"));
    assert!(text.starts_with("f:9:12: vm[0].vram_mib: "), "{text}");
}

#[test]
fn missing_key_names_the_table() {
    let text = mistake(&with_vm("card = \"card0\"\nvram_mib = 64\n"));
    assert!(text.starts_with("f:6:1: vm[0]: missing key `name`"), "{text}");
}

#[test]
fn unknown_kind_names_the_known_ones() {
    let text = mistake("[[card]]\nname = \"c\"\nkind = \"matrox\"\n");
    assert!(
        text.starts_with("f:3:8: card[0].kind: unknown variant `matrox`, expected one of `simgpu`, `cuda`, `vfio`"),
        "{text}"
    );
}

#[test]
fn bad_mode_is_shown_with_an_example() {
    let vm = "name = \"a\"\ncard = \"card0\"\nvram_mib = 64\nmode = ";
    for (mode, shown) in [("\"rw\"", "`rw`"), ("\"0888\"", "`0888`"), ("\"1777\"", "`1777`"), ("\"+77\"", "`+77`")] {
        let text = mistake(&with_vm(&format!("{vm}{mode}\n")));
        assert!(
            text.starts_with(&format!("f:10:8: vm[0].mode: {shown} is not an access mode, expected octal")),
            "{text}"
        );
    }
    let text = mistake(&with_vm(&format!("{vm}660\n")));
    assert!(text.starts_with("f:10:8: vm[0].mode: invalid type: integer `660`, expected a string of octal"), "{text}");
}

#[test]
fn bad_log_filter_is_shown() {
    let text = mistake("[daemon]\nlog = \"mediator=loud\"\n");
    assert!(text.starts_with("f:2:7: daemon.log: `mediator=loud` is not a log filter"), "{text}");
}

#[test]
fn relative_socket_is_refused() {
    let text = mistake("[daemon]\nadmin_socket = \"admin.sock\"\n");
    assert!(text.starts_with("f:2:16: daemon.admin_socket: `admin.sock` is not an absolute path"), "{text}");
}

#[test]
fn socket_path_too_long_for_the_kernel_is_refused() {
    let path = format!("/{}", "x".repeat(MAX));
    const MAX: usize = check::MAX_SOCKET_PATH;
    let text = mistake(&with_vm(&format!("name = \"a\"\ncard = \"card0\"\nvram_mib = 64\nsocket = \"{path}\"\n")));
    assert!(text.contains("vm[0].socket") && text.contains("108 bytes"), "{text}");
}

#[test]
fn bad_names_are_refused() {
    for name in ["", "-a", "a/b", "a b", "ä", &"x".repeat(64)] {
        let text = mistake(&with_vm(&format!("name = \"{name}\"\ncard = \"card0\"\nvram_mib = 64\nsocket = \"/s\"\n")));
        assert!(text.starts_with("f:7:8: vm[0].name: ") && text.contains("is not a name, expected 1 to 63"), "{text}");
    }
}

#[test]
fn second_card_of_a_name_is_refused() {
    let text = mistake(&format!("{CARD}{CARD}"));
    assert!(text.starts_with("f:7:8: card[1].name: `card0` is also the name of card[0]"), "{text}");
}

#[test]
fn second_vm_of_a_name_is_refused() {
    let vm = "name = \"a\"\ncard = \"card0\"\nvram_mib = 64\n";
    let text = mistake(&with_vm(&format!("{vm}[[vm]]\n{vm}")));
    assert!(text.starts_with("f:11:8: vm[1].name: `a` is the name of another VM"), "{text}");
}

#[test]
fn shared_socket_is_refused() {
    let text = mistake(&with_vm(
        "name = \"a\"\ncard = \"card0\"\nvram_mib = 64\nsocket = \"/s\"\n\
         [[vm]]\nname = \"b\"\ncard = \"card0\"\nvram_mib = 64\nsocket = \"/s\"\n",
    ));
    assert!(text.starts_with("f:15:10: vm[1].socket: `/s` is the socket of VM `a`"), "{text}");
}

#[test]
fn unknown_card_names_the_known_ones() {
    let text = mistake(&with_vm("name = \"a\"\ncard = \"card9\"\nvram_mib = 64\n"));
    assert_eq!(text, "f:8:8: vm[0].card: there is no card `card9`, expected `card0`");
    let text = mistake("[[vm]]\nname = \"a\"\ncard = \"card9\"\n");
    assert!(text.ends_with("there is no card `card9`, expected a [[card]] table first"), "{text}");
}

#[test]
fn more_vram_than_the_card_has_left_is_refused_with_the_sum() {
    let text = mistake(&with_vm(
        "name = \"a\"\ncard = \"card0\"\nvram_mib = 256\n[[vm]]\nname = \"b\"\ncard = \"card0\"\nvram_mib = 226\n",
    ));
    assert_eq!(
        text,
        "f:13:12: vm[1].vram_mib: 226 MiB, expected at most 224: card `card0` has 512 MiB, the mediator reserves 32, \
         other VMs are guaranteed 256"
    );
}

#[test]
fn vram_must_be_whole_chunks_and_enough_for_a_driver() {
    let text = mistake(&with_vm("name = \"a\"\ncard = \"card0\"\nvram_mib = 65\n"));
    assert!(text.ends_with("65 MiB, expected a multiple of the chunk of 2048 KiB"), "{text}");
    let text = mistake(&with_vm("name = \"a\"\ncard = \"card0\"\nvram_mib = 8\n"));
    assert!(text.ends_with("8 MiB, expected at least 16"), "{text}");
    let text = mistake(&with_vm("name = \"a\"\ncard = \"card0\"\n"));
    assert!(
        text.starts_with("f:6:1: vm[0].vram_mib: missing, expected at least 16 MiB of VRAM, or passthrough"),
        "{text}"
    );
}

#[test]
fn channels_out_of_range_are_refused() {
    for channels in [0, 129] {
        let text =
            mistake(&with_vm(&format!("name = \"a\"\ncard = \"card0\"\nvram_mib = 64\nchannels = {channels}\n")));
        assert_eq!(text, format!("f:10:12: vm[0].channels: {channels}, expected 1 to 128"));
    }
}

#[test]
fn passthrough_excludes_other_vms_in_both_orders() {
    let wired = "name = \"a\"\ncard = \"card0\"\npassthrough = true\n";
    let shared = "name = \"b\"\ncard = \"card0\"\nvram_mib = 64\n";
    let text = mistake(&with_vm(&format!("{wired}[[vm]]\n{shared}")));
    assert!(text.starts_with("f:12:8: vm[1].card: VM `a` uses card `card0` in passthrough"), "{text}");
    let text = mistake(&with_vm(&format!("{shared}[[vm]]\n{wired}")));
    assert!(text.starts_with("f:13:15: vm[1].passthrough: VM `b` uses card `card0`"), "{text}");
    let text = mistake(&with_vm(&format!("{wired}vram_mib = 64\n")));
    assert!(text.starts_with("f:10:12: vm[0].vram_mib: 64, expected no such key with passthrough"), "{text}");
}

#[test]
fn invalid_paravirtual_tables_are_rejected() {
    let shared = "name = \"b\"\ncard = \"card0\"\nvram_mib = 64\n";
    for (line, key) in [
        ("tables_mib = 0", "paravirtual.tables_mib: 0 MiB, expected 1 to 1024"),
        ("segments_mib = 2000", "paravirtual.segments_mib: 2000 MiB, expected 0 to 1024"),
        ("group = \"a b\"", "paravirtual.group: \"a b\" is not a name"),
    ] {
        let text = mistake(&with_vm(&format!("{shared}[vm.paravirtual]\n{line}\n")));
        assert!(text.contains(key), "{text}");
    }
    let wired = "name = \"a\"\ncard = \"card0\"\npassthrough = true\n[vm.paravirtual]\noffered = true\n";
    assert!(mistake(&with_vm(wired)).contains("paravirtual: expected no such table with passthrough"));
}

#[test]
fn card_out_of_range_is_refused() {
    for (line, key) in [
        ("vram_mib = 8192", "card[0].vram_mib: 8192 MiB, expected 16 to 6144"),
        ("bar1_mib = 100", "card[0].bar1_mib: 100 MiB, expected a power of two"),
        ("bar3_mib = 1024", "card[0].bar3_mib: 1024 MiB, expected a power of two"),
        ("chunk_kib = 3", "card[0].chunk_kib: 3 KiB, expected a power of two"),
        ("reserve_mib = 1024", "card[0].reserve_mib: 1024 MiB of 1024 MiB"),
        ("time = { copy_mib_per_s = 0 }", "card[0].time.copy_mib_per_s: 0, expected at least 1"),
        ("time = { copy_mib_per_s = 1, shader_mhz = 0 }", "card[0].time.shader_mhz: 0, expected at least 1"),
        (
            "time = { copy_mib_per_s = 1, bus_mib_per_s = 4294967297 }",
            "card[0].time.bus_mib_per_s: 4294967297, expected",
        ),
        ("time = { copy_mib_per_s = 9999999999999 }", "card[0].time.copy_mib_per_s: 9999999999999, expected at most"),
    ] {
        let text = mistake(&format!("[[card]]\nname = \"c\"\nkind = \"simgpu\"\n{line}\n"));
        assert!(text.starts_with("f:4:") && text.contains(key), "{text}");
    }
}

#[test]
fn all_config_errors_are_reported_at_once() {
    let text = "[daemon]\nlog = \"a=b=c\"\n[[card]]\nname = \"/\"\nkind = \"simgpu\"\n";
    let Err(ConfigError::Mistakes(mistakes)) = Config::parse(text, "f") else { panic!("accepted") };
    assert_eq!(mistakes.len(), 2, "{mistakes:?}");
}

#[test]
fn memory_that_is_promised_must_be_there() {
    let vm = |memory: &str| format!("name = \"a\"\ncard = \"card0\"\nvram_mib = 1024\n[vm.memory]\n{memory}\n");
    let with = |card: &str, memory: &str| {
        format!(
            "[[card]]\nname = \"card0\"\nkind = \"simgpu\"\nvram_mib = 512\nreserve_mib = 32\n{card}\n[[vm]]\n{}",
            vm(memory)
        )
    };
    for (card, memory, what) in [
        ("", "", "vm[0].vram_mib: 1024 MiB, expected at most 480: card `card0` has 512 MiB"),
        ("", "guarantee_mib = 500", "memory.guarantee_mib: 500 MiB, expected at most 480"),
        ("", "quota_mib = 64\nguarantee_mib = 128", "memory.guarantee_mib: 128 MiB, expected at most the quota of 64"),
        ("", "quota_mib = 63", "memory.quota_mib: 63 MiB, expected a multiple of the chunk of 2048 KiB"),
        ("", "guarantee_mib = 0\nweight = 0", "memory.weight: 0, expected 1 to 10000"),
        (
            "",
            "guarantee_mib = 0\non_full = \"swap\"",
            "memory.on_full: `swap`, expected another policy, or `memory.host_mib`",
        ),
        ("", "guarantee_mib = 0\non_full = \"wait\"", "`wait` is not a policy for a full card"),
        (
            "memory = { host_mib = 512 }",
            "guarantee_mib = 256",
            "vm[0].vram_mib: 1024 MiB of which 256 are guaranteed may need 768 MiB of host memory, expected at most 512",
        ),
        (
            "memory = { host_mib = 2048 }",
            "guarantee_mib = 256\nswap_cap_mib = 512",
            "memory.swap_cap_mib: 512 MiB, expected at least 768",
        ),
        ("memory = { host_mib = 511 }", "", "memory.host_mib: 511 MiB, expected a multiple"),
        ("memory = { victims = \"oldest\" }", "", "`oldest` is not a policy"),
        ("memory = { quanta = { mode = \"on\" } }", "", "`on` is not a mode"),
        ("memory = { return_ms = 0 }", "", "memory.return_ms: 0, expected 1 to 3600000"),
        ("memory = { chaos_every = 3 }", "", "memory.chaos_every: 3, expected 0, or `memory.host_mib` above 0"),
        ("memory = { reserve_mib = 480 }", "", "memory.reserve_mib: 480 MiB, expected less than the 480"),
        (
            "",
            "guarantee_mib = 0\nram.quota_mib = 917506",
            "memory.ram.quota_mib: 917506 MiB, expected an even number from 2 to",
        ),
        ("", "guarantee_mib = 0\nram.touch_mib = 3", "memory.ram.touch_mib: 3 MiB, expected an even number from 0 to"),
        ("", "guarantee_mib = 0\nram = { quota_mib = 64, guarantee_mib = 128 }", "at most the quota of 64 MiB"),
        ("memory = { ram = { quota_mib = 0 } }", "guarantee_mib = 0", "card[0].memory.ram.quota_mib: 0 MiB, expected"),
        ("memory.ram = 5", "", "expected struct RamSpec"),
    ] {
        let text = mistakes(&with(card, memory)).join("\n");
        assert!(text.contains(what), "{card} {memory}: {text}");
    }
    for (card, memory) in [
        ("overcommit = true", "ram = { quota_mib = 64, guarantee_mib = 0, touch_mib = 0 }"),
        ("memory = { host_mib = 1024 }", "guarantee_mib = 0"),
        ("memory = { host_mib = 768 }", "guarantee_mib = 256\nquota_mib = 300\nswap_cap_mib = 768"),
        ("", "guarantee_mib = 0\non_full = \"queue\""),
    ] {
        Config::parse(&with(card, memory), "f").unwrap();
    }
}

#[test]
fn ram_is_lent_as_the_vm_says_or_else_the_card() {
    let card = "[[card]]\nname = \"card0\"\nkind = \"simgpu\"\nmemory.ram = { quota_mib = 1024, touch_mib = 2 }\n";
    let vm = |name: &str, ram: &str| {
        format!("[[vm]]\nname = \"{name}\"\ncard = \"card0\"\nvram_mib = 16\n[vm.memory]\nram = {{ {ram} }}\n")
    };
    let config = Config::parse(&(card.to_owned() + &vm("a", "") + &vm("b", "quota_mib = 8192")), "f").unwrap();
    let ram = |index: usize| config.vms[index].memory.ram.on(&config.cards[0].memory);
    let spec = |quota_mib, guarantee_mib| RamSpec {
        quota_mib: Some(quota_mib),
        guarantee_mib: Some(guarantee_mib),
        touch_mib: Some(2),
    };
    assert_eq!((ram(0), ram(1)), (spec(1024, 1024), spec(8192, 4096)), "no guarantee beyond the quota");
    let many: String = ["a", "b"].map(|name| vm(name, "quota_mib = 600000, guarantee_mib = 600000")).concat();
    let text = mistakes(&(card.to_owned() + &many)).join("\n");
    assert!(text.contains("vm[1].memory.ram.guarantee_mib: 600000 MiB, expected at most 317504"), "{text}");
}

#[test]
fn mistakes_are_in_line_order_and_types_hide_none() {
    let text = "[[vm]]\nname = \"a b\"\ncard = \"card0\"\nvram_mib = 63\n\
                [[card]]\nname = \"card0\"\nkind = \"simgpu\"\nbar1_mib = 17\n\
                [daemon]\nlog = \"=\"\n";
    let lines: Vec<_> = mistakes(text).iter().map(|line| line[..line.find(": ").unwrap()].to_owned()).collect();
    assert_eq!(lines, ["f:2:8", "f:4:12", "f:8:12", "f:10:7"]);
    let text = "[daemon]\nlog = 7\n[[card]]\nname = \"card0\"\nkind = \"simgpu\"\nbar1_mib = \"big\"\nbar3_mib = 17\n\
                [[card]]\nname = \"card1\"\nkind = \"simgpu\"\nbar3_mib = 1\n\
                [[vm]]\nname = \"a\"\ncard = \"card0\"\nwram = 1\n\
                memory.quota_mib = \"x\"\nvram_mib = 64\n";
    let found = mistakes(text);
    let lines: Vec<_> = found.iter().map(|line| line.split(": ").take(2).collect::<Vec<_>>().join(" ")).collect();
    let expected = [
        "f:2:7 daemon.log",
        "f:6:12 card[0].bar1_mib",
        "f:7:12 card[0].bar3_mib",
        "f:11:12 card[1].bar3_mib",
        "f:15:1 vm[0].wram",
        "f:16:20 vm[0].memory.quota_mib",
    ];
    assert_eq!(lines, expected, "{found:?}");
}

#[test]
fn table_without_required_key_hides_no_other_table() {
    let text = format!(
        "{CARD}[[vm]]\ncard = \"card0\"\n[vm.memory]\nweight = 3\n\n\
         [[vm]]\nname = 5\ncard = \"card0\"\nvram_mib = 64\n[[vm]]\nname = \"c\"\nvram_mib = true\n"
    );
    let found = mistakes(&text);
    let lines: Vec<_> = found.iter().map(|line| line.split(": ").take(2).collect::<Vec<_>>().join(" ")).collect();
    assert_eq!(lines, ["f:6:1 vm[0]", "f:12:8 vm[1].name", "f:17:12 vm[2].vram_mib"], "{found:?}");
    assert!(found[0].contains("missing key `name`"), "{found:?}");
}

#[test]
fn unknown_profile_hides_no_other_mistake() {
    let text = format!(
        "{CARD}[[vm]]\nname = \"a\"\ncard = \"card0\"\nprofile = \"none\"\n\
         [[vm]]\nname = \"b\"\ncard = \"card0\"\nvram_mib = 8\n"
    );
    let found = mistakes(&text);
    assert_eq!(found.len(), 2, "{found:?}");
    assert!(found[0].contains("vm[0].profile") && found[1].contains("vm[1].vram_mib"), "{found:?}");
}

#[test]
fn memory_of_vm_is_refused_with_all_reasons() {
    let text = with_vm("name = \"a\"\ncard = \"card0\"\nvram_mib = 9999\nmemory.guarantee_mib = 600\n");
    let text = text.replace("reserve_mib = 32", "reserve_mib = 32\nchunk_kib = 2048");
    let found = mistakes(&text).join("\n");
    assert!(found.contains("9999 MiB, expected a multiple of the chunk"), "{found}");
    assert!(found.contains("600 MiB, expected at most 480"), "{found}");
}
