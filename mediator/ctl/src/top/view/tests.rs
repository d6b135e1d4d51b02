//! Tests screens of several widths on an in-memory terminal.

use super::*;
use api::{
    CardMemory, CardScheduler, Durations, EngineUse, Quarantine, Tenant, Turn, Vm, VmEngine, VmMemory, VmShare, VmTime,
};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use sched::Engine;

mod picture;

const SECOND: Duration = Duration::from_secs(1);

/// Returns a card with two VMs. Each has started `count` compute submissions, which waited for `sum_ns` in total.
fn card(count: u64, sum_ns: u64, quarantine: Option<Quarantine>) -> CardScheduler {
    let wait = Durations { count, sum_ns, p99_ns: 5_000_000, ..Durations::default() };
    let used = VmEngine { arrived: count, received_permille: 305, wait, ..VmEngine::default() };
    let vm = |name: &str| VmShare {
        state: api::WorkState::Idle,
        waits_for: None,
        wait_reason: None,
        vm: name.to_owned(),
        time: VmTime::default(),
        entitled_permille: 500,
        copies_entitled_permille: None,
        queued: 4,
        in_flight: 1,
        strikes: 2,
        overdue: Vec::new(),
        quarantine,
        engines: [(Engine::Compute, used.clone()), (Engine::Copy0, VmEngine::default())].into(),
    };
    let busy = EngineUse { busy_permille: 610, ..EngineUse::default() };
    CardScheduler {
        card: "card0".to_owned(),
        settings: sched::Config::default(),
        window_ms: 1000,
        queued: 8,
        in_flight: 2,
        engines: [(Engine::Compute, busy)].into(),
        vms: vec![vm("web"), vm("build")],
    }
}

fn time(card: CardScheduler) -> Look {
    Look { schedulers: vec![card], ..Look::default() }
}

/// Returns a card with two VMs. For `web`, `moved` MiB were moved out, and memory was denied `denied` times.
fn memory(moved: u64, denied: u64, turn: Option<Turn>) -> Look {
    let mib = |mib: u64| mib << 20;
    let suspensions = Durations { count: 3, p99_ns: 7_000_000, ..Durations::default() };
    let web = VmMemory {
        vm: "web".to_owned(),
        advertised_bytes: mib(64),
        on_card_bytes: mib(20),
        entitled_bytes: mib(24),
        quota_bytes: mib(32),
        in_host_bytes: mib(8),
        in_reserve_bytes: mib(2),
        moved_out_bytes: mib(moved),
        memory_denied: denied,
        suspensions,
        ..VmMemory::default()
    };
    let build = VmMemory { vm: "build".to_owned(), ..VmMemory::default() };
    let card = CardMemory {
        card: "card0".to_owned(),
        settings: config::CardMemory::default(),
        chunk_bytes: mib(2),
        card_bytes: mib(128),
        mediator_bytes: 0,
        spare_bytes: mib(60),
        to_scrub_bytes: 0,
        quarantined_bytes: 0,
        scrubbed_bytes: 0,
        reserve_used_bytes: 0,
        host_budget_bytes: mib(64),
        host_used_bytes: mib(10),
        windows_bytes: 0,
        moved_out_bytes: 0,
        moved_in_bytes: 0,
        turns: 0,
        copy_bytes_per_second: 0,
        turn,
        vms: vec![build, web],
    };
    Look { memories: vec![card], ..Look::default() }
}

fn screen(view: &mut View, lines: u16) -> Vec<String> {
    screen_of(view, 140, lines)
}

fn screen_of(view: &mut View, width: u16, lines: u16) -> Vec<String> {
    let mut terminal = Terminal::new(TestBackend::new(width, lines)).unwrap();
    terminal.draw(|frame| view.draw(frame)).unwrap();
    let buffer = terminal.backend().buffer().clone();
    let line = |row: u16| (0..width).map(|column| buffer[(column, row)].symbol()).collect::<String>();
    (0..lines).map(|row| line(row).trim_end().to_owned()).collect()
}

#[test]
fn names_are_no_commands_to_the_terminal() {
    let mut odd = card(1, 1, None);
    odd.card = "card\u{9b}2J".to_owned();
    odd.vms[0].vm = "web\x1b[31m\u{202e}".to_owned();
    let mut view = View::default();
    view.show(time(odd), SECOND);
    let shown = screen(&mut view, 6).join("\n") + &view.text();
    assert!(shown.contains("\\u{9b}2J") && shown.contains("web\\u{1b}"), "{shown}");
    let bad = |c: char| c != '\n' && (c.is_control() || c == '\u{202e}');
    view.fail("no\x1b]0;x\x07".to_owned());
    assert!(!screen(&mut view, 6).join("\n").chars().any(bad));
    // For files and pipes, `Form::shown` escapes the text, including the headers.
    assert!(!crate::Form::Table.shown(&view.text()).chars().any(bad));
}

fn cells(line: &str) -> Vec<&str> {
    line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).collect()
}

#[test]
fn waits_are_those_since_the_look_before() {
    let mut view = View::default();
    let shown = |view: &View| view.table(Page::Time).1[0].cells[7].text.clone();
    view.show(time(card(10, 10_000_000, None)), SECOND);
    assert_eq!(shown(&view), "1 ms");
    view.show(time(card(14, 30_000_000, None)), SECOND);
    assert_eq!(shown(&view), "5 ms");
    view.show(time(card(14, 30_000_000, None)), SECOND);
    assert_eq!(shown(&view), "-", "nothing was started");
    // Show a different VM with the same name.
    view.show(time(card(2, 6_000_000, None)), SECOND);
    assert_eq!(shown(&view), "3 ms");
}

#[test]
fn top_screen_shows_card_vms_and_errors() {
    let mut view = View::default();
    view.show(time(card(10, 10_000_000, Some(Quarantine { ends_in_ms: Some(1500) }))), SECOND);
    let lines = screen(&mut view, 6);
    assert_eq!(lines[0], "card0: band; busy: compute 61.0 %; queued 8, on the card 2");
    assert_eq!(
        cells(&lines[2]),
        [
            "card0",
            "web",
            "compute",
            "50.0 %",
            "30.5 %",
            "████|·····",
            "▃",
            "1 ms",
            "5 ms",
            "-",
            "-",
            "4",
            "2",
            "QUARANTINED for…"
        ]
    );
    assert_eq!(cells(&lines[3])[1], "build", "an engine that is not used has no line");
    assert_eq!((&*lines[4], &*lines[5]), ("", "q: quit, ?: help, m: show memory"));
    view.scroll_by(1);
    assert_eq!(cells(&screen(&mut view, 6)[2])[1], "build");
    view.scroll_by(9);
    view.scroll_by(-20);
    view.fail("no daemon responds".to_owned());
    let lines = screen(&mut view, 6);
    assert_eq!((cells(&lines[2])[1], &*lines[5]), ("web", "no daemon responds"));
}

#[test]
fn top_memory_page_shows_amounts_moved_since_last_refresh() {
    let mut view = View::default();
    view.show(memory(6, 0, None), SECOND);
    view.turn_over();
    let lines = screen(&mut view, 6);
    assert_eq!(lines[0], "card0: 128 MiB, spare 60 MiB; host memory 10 MiB of 64 MiB");
    let web = ["card0", "web", "64 MiB", "20 MiB", "24 MiB", "32 MiB", "10 MiB", "6 MiB", "7 ms", "-"];
    assert_eq!(cells(&lines[3]), web);
    assert_eq!((cells(&lines[2])[8], &*lines[5]), ("-", "q: quit, ?: help, m: show processes"));
    let turn = Turn { holder: "web".to_owned(), members: vec!["build".to_owned(), "web".to_owned()], quantum_ms: 1 };
    view.show(memory(10, 0, Some(turn)), SECOND);
    let states =
        |view: &View| view.table(Page::Memory).1.into_iter().map(|line| line.cells[9].text.clone()).collect::<Vec<_>>();
    assert_eq!(states(&view), ["waits for its turn", "has its turn"]);
    let line = |view: &View| view.table(Page::Memory).1[1].clone();
    assert_eq!((line(&view).cells[7].text.as_str(), line(&view).tone), ("4 MiB", Tone::Odd));
    view.show(memory(10, 2, None), SECOND);
    assert_eq!((line(&view).cells[9].text.as_str(), line(&view).tone), ("2 WITHOUT MEMORY", Tone::Bad));
    view.show(memory(10, 2, None), SECOND);
    assert_eq!((line(&view).cells[9].text.as_str(), line(&view).tone), ("-", Tone::Odd));
}

#[test]
fn text_has_both_tables() {
    let mut view = View::default();
    view.show(Look { memories: memory(6, 0, None).memories, ..time(card(1, 1, None)) }, SECOND);
    let text = view.text();
    assert!(text.contains("RECEIVED") && text.contains("IN HOST"), "{text}");
    assert!(text.find("busy: compute") < text.find("host memory 10 MiB"), "{text}");
}

/// Returns a tenant with two programs, one of which uses unaccounted memory.
fn training() -> Tenant {
    let text = r#"{
        "name": "training-of-team-0-with-a-long-name", "card": "h100-0", "served": true, "socket": "/run/t.sock",
        "vram_mib": 1024, "memory": {}, "time": { "weight": 100, "guarantee_permille": 0, "cap_permille": 1000, "class": "normal" },
        "programs": [{ "pid": 812, "name": "python3" }, { "pid": 90017, "name": "eval\u001b" }],
        "on_card_bytes": 0, "in_host_bytes": 0, "used_ns": 0, "busy_ns": 0, "copy_ns": 0, "received_permille": 0,
        "entitled_permille": 0, "launches": 0, "wait_p99_ns": 0, "killed": 0,
        "unaccounted": [{ "pid": 90017, "program": "eval", "bytes": 67108864 }] }"#;
    serde_json::from_str(text).unwrap()
}

/// Returns a VM with a VMM and two programs that use CUDA: one is process 44 of the guest, and the other has lost its
/// worker.
fn guest() -> Vm {
    let text = r#"{
        "name": "build", "card": "h100-1", "mode": "cuda", "state": "connected", "client": { "pid": 4711, "uid": 107 },
        "vram_mib": 512, "channels_limit": 0, "channels_used": 0, "memory_not_shared": false, "memory_withdrawn": false,
        "ram": {}, "driver": { "pci_id": "", "bus_master": false, "interrupts": "msi" }, "denied_total": 0, "denied": [],
        "counters": {}, "transport": {}, "programs": [
            { "name": "train", "pid": 44, "window_bytes": 67108864, "waits": 1, "lost": false },
            { "name": "", "window_bytes": 0, "waits": 0, "lost": true }] }"#;
    serde_json::from_str(text).unwrap()
}

/// Returns two cards whose VMs have long names and the largest sizes and shares.
fn busy() -> Look {
    let mut schedulers = vec![card(10, 10_000_000, None), card(12_000, 9_000_000_000, None)];
    let mut memories = vec![memory(6, 0, None).memories.remove(0), memory(600, 0, None).memories.remove(0)];
    for (index, (scheduler, memory)) in schedulers.iter_mut().zip(&mut memories).enumerate() {
        let card = format!("h100-{index}");
        (scheduler.card, memory.card) = (card.clone(), card);
        scheduler.vms[0].vm = format!("training-of-team-{index}-with-a-long-name");
        memory.vms[1].vm = scheduler.vms[0].vm.clone();
        scheduler.vms[0].entitled_permille = 1000;
        memory.vms[1].on_card_bytes = 81_559 << 20;
        memory.vms[0].on_card_bytes = 256 << 20;
    }
    Look { schedulers, memories, tenants: vec![training()], vms: vec![guest()] }
}

/// Returns the screens of all pages at a width of `width` columns.
fn screens(width: u16) -> String {
    let mut view = View::default();
    for _ in 0..40 {
        view.show(busy(), SECOND);
    }
    let time = screen_of(&mut view, width, 11).join("\n");
    view.turn_over();
    let memory = screen_of(&mut view, width, 9).join("\n");
    view.turn_over();
    format!("{time}\n---\n{memory}\n---\n{}\n", screen_of(&mut view, width, 7).join("\n"))
}

#[test]
fn generated_screens_of_four_widths_are_committed() {
    for width in [60, 80, 130, 200] {
        doc_pages::file(&format!("mediator/ctl/src/top/view/screens/{width}.txt"), &screens(width));
    }
}

#[test]
fn numbers_are_whole_at_every_width() {
    for width in 40..=220 {
        let screens = screens(width);
        for line in screens.lines().filter(|line| line.contains("MiB") || line.contains('%')) {
            assert!(line.chars().count() <= usize::from(width), "{width}: {line}");
        }
        // These sizes and shares appear untruncated at every width.
        for whole in ["81559 MiB", "256 MiB", "30.5 %"] {
            assert!(screens.contains(whole), "{width}: {whole} in\n{screens}");
        }
        let words: Vec<&str> = screens.split_whitespace().collect();
        for pair in words.windows(2).filter(|pair| pair[1].starts_with("MiB")) {
            let known = ["81559", "256", "64", "24", "32", "10", "0", "128", "60", "6", "600", "WINDOW"];
            assert!(known.contains(&pair[0]), "{width}: {} MiB in\n{screens}", pair[0]);
        }
    }
}

#[test]
fn keys_sort_filter_and_show_help() {
    use crate::top::Reaction;
    use ratatui::crossterm::event::{Event, KeyCode, KeyEvent, KeyModifiers, MouseEvent, MouseEventKind};
    let mut view = View::default();
    let mut look = busy();
    for (index, scheduler) in look.schedulers.iter_mut().enumerate() {
        for vm in &mut scheduler.vms {
            vm.engines.values_mut().for_each(|used| used.received_permille = 100 + 400 * index as u32);
        }
    }
    view.show(look, SECOND);
    let press = |view: &mut View, code: KeyCode| view.react(&Event::Key(KeyEvent::new(code, KeyModifiers::NONE)));
    let first =
        |view: &mut View| cells(&screen(view, 12)[3]).first().map(|cell| (*cell).to_owned()).unwrap_or_default();
    assert_eq!(first(&mut view), "h100-0");
    assert_eq!(press(&mut view, KeyCode::Char('s')), Reaction::Draw);
    assert_eq!(first(&mut view), "h100-1", "by RECEIVED");
    assert!(screen(&mut view, 12)[11].ends_with("by RECEIVED"));
    for key in "/h100-0".chars() {
        press(&mut view, KeyCode::Char(key));
    }
    assert_eq!(screen(&mut view, 12)[11], "filter: h100-0_");
    press(&mut view, KeyCode::Enter);
    let lines = screen(&mut view, 12);
    assert!(
        lines[11].ends_with("only `h100-0`") && lines[3..11].iter().all(|line| !line.contains("h100-1")),
        "{lines:?}"
    );
    assert_eq!(press(&mut view, KeyCode::Char('?')), Reaction::Draw);
    assert!(screen(&mut view, 12).join("\n").contains("q, Esc     end"));
    assert_eq!(press(&mut view, KeyCode::Esc), Reaction::Draw, "it only closes the help");
    let wheel = MouseEvent { kind: MouseEventKind::ScrollDown, column: 0, row: 0, modifiers: KeyModifiers::NONE };
    assert_eq!(view.react(&Event::Mouse(wheel)), Reaction::Draw);
    assert_eq!(view.scroll.offset(), 1, "of two lines");
    press(&mut view, KeyCode::Char('/'));
    press(&mut view, KeyCode::Backspace);
    press(&mut view, KeyCode::Esc);
    assert_eq!(view.filter, "");
    assert_eq!(press(&mut view, KeyCode::Char('q')), Reaction::End);
}

#[test]
fn bars_are_whole_at_every_width() {
    for width in 50..=220 {
        assert!(screens(width).contains("████·····|"), "{width}:\n{}", screens(width));
    }
}

#[test]
fn processes_have_the_ids_of_host_and_guest() {
    let mut view = View::default();
    view.show(busy(), SECOND);
    view.turn_over();
    view.turn_over();
    for width in [60, 80, 130, 200] {
        let lines = screen_of(&mut view, width, 8);
        let line = |word: &str| {
            let found = lines.iter().find(|line| line.contains(word));
            cells(found.unwrap_or_else(|| panic!("{width}: no {word} in {lines:#?}"))).join(" | ")
        };
        assert!(line("python3").contains("python3 | 812 | -"), "{width}: {lines:#?}");
        assert!(line("eval").contains("eval\\u{1b} | 90017"), "{width}: {lines:#?}");
        assert!(line("VMM").contains("VMM | 4711"), "{width}: {lines:#?}");
        assert!(line("  train  ").contains("train | - | 44"), "{width}: {lines:#?}");
    }
    let text = view.text();
    assert!(text.contains("PROCESS") && text.contains("64 MiB UNACCOUNTED") && text.contains("LOST"), "{text}");
}

#[test]
fn guest_program_and_its_worker_have_one_line() {
    let mut look = busy();
    let worker = serde_json::json!({ "pid": 5000, "name": "cuda-worker", "guest": { "name": "train", "pid": 44 } });
    let starting = serde_json::json!({ "pid": 5001, "name": "cuda-worker" });
    let mut tenant = training();
    (tenant.name, tenant.card) = ("build".to_owned(), "h100-1".to_owned());
    tenant.programs = [worker, starting].map(|program| serde_json::from_value(program).unwrap()).into();
    tenant.unaccounted.first_mut().unwrap().pid = 5000;
    look.tenants.push(tenant);
    look.vms[0].programs[0].worker = Some(5000);
    let lines: Vec<_> = processes::lines(&look).into_iter().filter(|line| line.cells[1].text == "build").collect();
    let text = |line: &Line| line.cells[2..].iter().map(|cell| cell.text.clone()).collect::<Vec<_>>().join(" | ");
    assert_eq!(
        lines.iter().map(text).collect::<Vec<_>>(),
        [
            "cuda-worker | 5001 | - | - | -",
            "VMM | 4711 | - | - | user 107",
            "train | 5000 | 44 | 64 MiB | 64 MiB UNACCOUNTED",
            "- | - | - | 0 MiB | LOST",
        ]
    );
    let words = processes::in_words(&look, "h100-1", "build").unwrap();
    assert!(words.contains("train (44 in the guest, worker 5000)"), "{words}");
}

#[test]
fn click_on_a_head_sorts_and_a_second_reverses() {
    use crate::top::Reaction;
    use ratatui::crossterm::event::{Event, KeyModifiers, MouseButton, MouseEvent, MouseEventKind};
    let click = |view: &mut View, column: usize, row: u16| {
        let kind = MouseEventKind::Down(MouseButton::Left);
        let column = u16::try_from(column).unwrap();
        view.react(&Event::Mouse(MouseEvent { kind, column, row, modifiers: KeyModifiers::NONE }))
    };
    for width in [60, 80, 130, 200] {
        let mut view = View::default();
        view.show(busy(), SECOND);
        let head = |view: &mut View, name: &str| {
            let line = screen_of(view, width, 12)[2].clone();
            let at = line.find(name).unwrap_or_else(|| panic!("{width}: no {name} in {line}"));
            line[..at].chars().count()
        };
        let vms = |view: &mut View| -> Vec<String> {
            let lines = screen_of(view, width, 12);
            let found =
                lines[3..7].iter().map(|line| if line.contains("build") { "build" } else { "training" }.to_owned());
            found.collect()
        };
        assert_eq!(vms(&mut view), ["training", "build", "training", "build"], "{width}");
        let at = head(&mut view, "ON CARD");
        assert_eq!(click(&mut view, at, 2), Reaction::Draw);
        assert_eq!(vms(&mut view), ["training", "training", "build", "build"], "{width}: the largest first");
        assert!(screen_of(&mut view, width, 12)[11].ends_with("by ON CARD"), "{width}");
        assert_eq!(click(&mut view, at, 2), Reaction::Draw);
        assert_eq!(vms(&mut view), ["build", "build", "training", "training"], "{width}: reversed");
        let at = head(&mut view, "VM");
        assert_eq!(click(&mut view, at, 2), Reaction::Draw);
        assert_eq!(vms(&mut view)[..2], ["build", "build"], "{width}: by name");
        // Clicks between two columns, outside the table, or below the last line have no effect.
        let gap = head(&mut view, "RECEIVED") - 1;
        for (column, row) in [(gap, 2), (0, 0), (0, 11), (0, 9)] {
            assert_eq!(click(&mut view, column, row), Reaction::Nothing, "{width}: {column}, {row}");
        }
    }
}

#[test]
fn click_on_a_line_selects_it_and_shows_its_processes() {
    use ratatui::style::Modifier;
    let mut view = View::default();
    view.show(busy(), SECOND);
    let draw = |view: &mut View| {
        let mut terminal = Terminal::new(TestBackend::new(130, 12)).unwrap();
        terminal.draw(|frame| view.draw(frame)).unwrap();
        terminal.backend().buffer().clone()
    };
    let is_reversed = |view: &mut View, row: u16| draw(view)[(9, row)].modifier.contains(Modifier::REVERSED);
    draw(&mut view);
    assert!(view.click(9, 3));
    assert!(is_reversed(&mut view, 3) && !is_reversed(&mut view, 4));
    let last = |view: &mut View| screen_of(view, 130, 12)[11].clone();
    let shown = last(&mut view);
    assert_eq!(shown, "training-of-team-0-with-a-long-name: python3 (812), eval\\u{1b} (90017)");
    // The selection survives a change of order and of page.
    view.reorder();
    view.reorder();
    view.reorder();
    assert!((3..7).any(|row| is_reversed(&mut view, row)));
    view.turn_over();
    assert!((3..7).any(|row| is_reversed(&mut view, row)));
    assert!(last(&mut view).starts_with("training-of-team-0"));
    // For a VM, the line shows its VMM and its guest programs.
    let row = (3..7).find(|&row| screen_of(&mut view, 130, 12)[row].starts_with("h100-1  build")).unwrap();
    assert!(view.click(9, u16::try_from(row).unwrap()));
    assert_eq!(last(&mut view), "build: VMM (4711), train (44 in the guest), -");
    assert!(view.click(9, u16::try_from(row).unwrap()), "a second click clears the selection");
    assert!(last(&mut view).starts_with("q: quit"));
}

#[test]
fn history_keeps_one_minute() {
    let mut view = View::default();
    for _ in 0..100 {
        view.show(busy(), SECOND);
    }
    let key = ("h100-0".to_owned(), "build".to_owned(), Engine::Compute);
    assert_eq!(view.history.picture(&key), "▃".repeat(15));
    view.show(Look::default(), SECOND);
    assert_eq!(view.history.picture(&key), "", "a removed VM has no history");
}
