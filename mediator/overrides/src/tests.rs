//! Tests the stored state under edits of the configuration file, a kill at each step, and corruption.

use std::io;
use std::path::Path;

use proptest::collection::{btree_map, vec};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use tempfile::TempDir;

use super::override_store::parsed;
use super::store::{Step, Store};
use super::*;
use config::TimeShare;

fn vm(name: &str, weight: u32, max_run_ms: Option<u64>) -> VmSpec {
    let time = TimeShare { weight, max_run_ms, ..TimeShare::default() };
    VmSpec { time, ..VmSpec::new(name, "card0", 16) }
}

fn tenant(name: &str) -> TenantSpec {
    let table = serde_json::json!({ "name": name, "card": "cuda0", "vram_mib": 16 });
    TenantSpec::from_table(table.as_object().unwrap()).unwrap()
}

fn file(text: &str) -> Config {
    let cards = "[[card]]\nname = \"card0\"\nkind = \"simgpu\"\nvram_mib = 256\n";
    Config::parse(&format!("{cards}{text}"), "test").unwrap()
}

const WEB: &str = "[[vm]]\nname = \"web\"\ncard = \"card0\"\nvram_mib = 16\n";

/// Returns the settings in `file` after a change at run time.
fn live(file: &Config, change: impl FnOnce(&mut Live)) -> Live {
    let mut live = Live::from_config(file);
    change(&mut live);
    live
}

fn weight_of(config: &Config, name: &str) -> Option<u32> {
    config.vms.iter().find(|vm| vm.name == name).map(|vm| vm.time.weight)
}

#[test]
fn differences_applied_to_file_restore_live_state() {
    // Use only a few different names, so that many occur in both lists.
    let vms = || {
        let one = (1..50u32, proptest::option::of(0..9u64), any::<bool>());
        btree_map(0..6u8, one, 0..6).prop_map(|vms| {
            let one = |(name, (weight, max_run_ms, wide)): (u8, (u32, Option<u64>, bool))| VmSpec {
                channels: wide.then_some(64),
                memory: config::VmMemory { quota_mib: wide.then_some(8), ..config::VmMemory::default() },
                ..vm(&format!("vm{name}"), weight, max_run_ms)
            };
            vms.into_iter().map(one).collect::<Vec<_>>()
        })
    };
    let strikes = || vec(0..4u32, 2);
    // The tenants mirror the virtual machines, with different names.
    let tenants = |vms: &[VmSpec]| -> Vec<TenantSpec> {
        let one = |vm: &VmSpec| TenantSpec {
            time: vm.time,
            memory: vm.memory.clone(),
            ..tenant(&vm.name.replace("vm", "t"))
        };
        vms.iter().map(one).collect()
    };
    let test = |(in_file, now, file_strikes, now_strikes): (Vec<VmSpec>, Vec<VmSpec>, Vec<u32>, Vec<u32>)| {
        let (file_tenants, now_tenants) = (tenants(&in_file), tenants(&now));
        let cards = "[[card]]\nname = \"card0\"\nkind = \"simgpu\"\n[[card]]\nname = \"card1\"\nkind = \"simgpu\"\n";
        let mut file = Config { vms: in_file, tenants: file_tenants, ..Config::parse(cards, "test").unwrap() };
        let mut live = Live {
            vms: now.into_iter().map(|vm| (vm.name.clone(), vm)).collect(),
            tenants: now_tenants.into_iter().map(|tenant| (tenant.name.clone(), tenant)).collect(),
            ..Live::from_config(&file)
        };
        for (card, (strikes, now)) in file.cards.iter_mut().zip(file_strikes.into_iter().zip(now_strikes)) {
            (card.scheduler.strikes, card.drained) = (strikes, strikes > 1);
            let scheduler = sched::Config { strikes: now, ..sched::Config::default() };
            let memory = CardMemory { return_ms: 50 + u64::from(now), ..card.memory };
            live.tunings.insert(card.name.clone(), Tuning { scheduler, memory, drained: now % 2 == 1 });
        }
        let state = State::between(&file, &live).unwrap();
        let text = serde_json::to_vec_pretty(&state).unwrap();
        let read = parsed(&text, Path::new("state.json")).unwrap();
        prop_assert_eq!(&read, &state);
        let (config, forgotten) = read.applied(&file).unwrap();
        prop_assert_eq!(Live::from_config(&config), live.clone());
        prop_assert_eq!(forgotten, Vec::<String>::new());
        // A second start gives the same result, so repeated starts do not change the state.
        prop_assert_eq!(State::between(&file, &Live::from_config(&config)).unwrap(), state);
        Ok(())
    };
    TestRunner::default().run(&(vms(), vms(), strikes(), strikes()), test).unwrap();
}

#[test]
fn edited_file_value_wins_over_kept_override() {
    let old = file(WEB);
    let state = State::between(
        &old,
        &live(&old, |live| {
            let time = &mut live.vms.get_mut("web").unwrap().time;
            (time.weight, time.cap_permille) = (300, 700);
            live.vms.insert("new".to_owned(), vm("new", 5, None));
        }),
    );
    let state = state.unwrap();

    let (config, forgotten) = state.applied(&old).unwrap();
    assert_eq!((weight_of(&config, "web"), weight_of(&config, "new"), forgotten.len()), (Some(300), Some(5), 0));

    // One key was edited, so the file takes precedence for this key; the other key keeps its change.
    let (config, forgotten) = state.applied(&file(&format!("{WEB}time = {{ weight = 50 }}\n"))).unwrap();
    assert_eq!((weight_of(&config, "web"), config.vms[0].time.cap_permille), (Some(50), 700));
    assert_eq!(
        forgotten,
        ["time.weight of VM `web` was changed from 100 to 300, but the configuration file now has 50"]
    );
    // The file was edited to the changed value, so no message is needed.
    let (config, forgotten) = state.applied(&file(&format!("{WEB}time = {{ weight = 300 }}\n"))).unwrap();
    assert_eq!((weight_of(&config, "web"), forgotten.len()), (Some(300), 0));
    // The file now contains the new VM, and no longer contains the old one.
    let (config, forgotten) = state.applied(&file(&WEB.replace("web", "new"))).unwrap();
    assert_eq!((weight_of(&config, "web"), weight_of(&config, "new")), (None, Some(100)));
    assert_eq!(forgotten.len(), 2, "{forgotten:?}");
}

#[test]
fn removed_vm_stays_away_until_its_table_is_edited() {
    let old = file(WEB);
    let state = State::between(&old, &Live { vms: BTreeMap::new(), ..Live::from_config(&old) }).unwrap();
    assert_eq!(state.applied(&old).unwrap().0.vms, []);
    let edited = file(&WEB.replace("= 16", "= 32"));
    let (config, forgotten) = state.applied(&edited).unwrap();
    assert_eq!(config.vms, edited.vms);
    assert!(forgotten[0].starts_with("VM `web` was removed, but its table"), "{forgotten:?}");
}

#[test]
fn kill_during_state_write_leaves_old_or_new_state() {
    const STEPS: [Step; 7] =
        [Step::Create, Step::Write, Step::WriteRest, Step::Sync, Step::Rename, Step::SyncFolder, Step::Done];
    for end in STEPS {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path()).unwrap();
        store.write(b"the old state").unwrap();
        let mut passed = Vec::new();
        let result = store.write_by_steps(b"the new state, which is longer", &mut |step| {
            passed.push(step);
            if step == end { Err(io::ErrorKind::Interrupted.into()) } else { Ok(()) }
        });
        assert!(result.is_err());
        assert_eq!(passed, STEPS[..=STEPS.iter().position(|step| *step == end).unwrap()]);
        let renamed = matches!(end, Step::SyncFolder | Step::Done);
        let expected: &[u8] = if renamed { b"the new state, which is longer" } else { b"the old state" };
        assert_eq!(store.read().unwrap().as_deref(), Some(expected), "{end:?}");
        // The next write replaces a leftover file.
        drop(store);
        let store = Store::open(folder.path()).unwrap();
        store.write(b"short").unwrap();
        assert_eq!(store.read().unwrap().as_deref(), Some(&b"short"[..]));
        let mut names: Vec<_> =
            std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["lock", "state.json"]);
    }
}

/// Returns a configuration with the state folder `folder`, which contains the state `text`.
fn kept(folder: &TempDir, text: &[u8]) -> Config {
    let mut config = file(WEB);
    config.daemon.state_dir = Some(folder.path().to_owned());
    std::fs::write(folder.path().join(FILE), text).unwrap();
    config
}

fn refused(config: Config) -> String {
    OverrideStore::open(config, false).err().unwrap().to_string()
}

#[test]
fn damaged_state_is_reported_with_position_and_can_be_ignored() {
    let old = file(WEB);
    let state = State::between(
        &old,
        &live(&old, |live| {
            live.vms.get_mut("web").unwrap().time.weight = 300;
            live.vms.insert("new".to_owned(), vm("new", 5, None));
        }),
    );
    let text = serde_json::to_string_pretty(&state.unwrap()).unwrap();
    for cut in 0..text.len() {
        let folder = tempfile::tempdir().unwrap();
        let error = refused(kept(&folder, &text.as_bytes()[..cut]));
        let at = format!("{}/state.json:{}:", folder.path().display(), text[..cut].lines().count().max(1));
        let near = |error: &str| error.starts_with(&at) || cut == 0 || text[..cut].ends_with('\n');
        assert!(near(&error) && error.contains("EOF while parsing"), "{cut}: {error}, {at}");
        assert!(error.contains("--ignore-state"), "{error}");
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("state.json").display().to_string();
    for (bad, good, expected) in [
        ("\"weight\": \"much\"", "\"weight\": 5", "invalid type: string \"much\", expected u32"),
        ("\"version\": 2", "\"version\": 1", "it has version 2, but this daemon reads version 1"),
        ("\"vms_addde\"", "\"vms_added\"", "unknown field `vms_addde`"),
    ] {
        let error = refused(kept(&folder, text.replacen(good, bad, 1).as_bytes()));
        assert!(error.starts_with(&path) && error.contains(expected), "{error}");
    }
    let error = refused(kept(&folder, text.replace("\"time.weight\"", "\"time.wight\"").as_bytes()));
    assert!(error.contains("time.wight"), "{error}");

    let (config, override_store) = OverrideStore::open(kept(&folder, b"what is this"), true).unwrap();
    assert_eq!(config.vms, old.vms);
    assert_eq!(std::fs::read(folder.path().join("state.json.ignored")).unwrap(), b"what is this");
    drop(override_store);
    assert!(OverrideStore::open(config, false).is_ok());
}

#[test]
fn state_conflicting_with_file_is_reported_with_vm_and_key() {
    let folder = tempfile::tempdir().unwrap();
    let old = file(WEB);
    let state = State::between(
        &old,
        &live(&old, |live| {
            live.vms.insert("new".to_owned(), VmSpec { vram_mib: Some(128), ..vm("new", 5, None) });
        }),
    );
    let mut config = kept(&folder, &serde_json::to_vec(&state.unwrap()).unwrap());
    config.vms[0].vram_mib = Some(128);
    let error = refused(config);
    assert!(error.contains("VM `new`: vram_mib: 128 MiB, expected at most 96"), "{error}");
    assert!(error.contains("correct this, or start once with --ignore-state"), "{error}");
}

#[test]
fn two_daemons_do_not_share_a_state_folder() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = file(WEB);
    config.daemon.state_dir = Some(folder.path().join("made/for/it"));
    let (_, override_store) = OverrideStore::open(config.clone(), false).unwrap();
    let error = refused(config.clone());
    assert!(error.contains("is in use by another daemon"), "{error}");
    drop(override_store);
    assert!(OverrideStore::open(config, false).is_ok());
}

#[test]
fn overridden_change_is_dropped_permanently() {
    let folder = tempfile::tempdir().unwrap();
    let old = file(WEB);
    let state = State::between(&old, &live(&old, |live| live.vms.get_mut("web").unwrap().time.weight = 300)).unwrap();
    let config = kept(&folder, &serde_json::to_vec(&state).unwrap());
    let mut edited = config.clone();
    edited.vms[0].time.weight = 50;
    assert_eq!(weight_of(&OverrideStore::open(edited, false).unwrap().0, "web"), Some(50));
    // The file contains its old value again, but the dropped difference must not reappear.
    assert_eq!(weight_of(&OverrideStore::open(config, false).unwrap().0, "web"), Some(100));
}

#[test]
fn drain_mark_and_moved_vm_are_kept_across_restart() {
    let two = |drained: &str| {
        let second = "[[card]]\nname = \"card1\"\nkind = \"simgpu\"\n";
        let cards = format!("[[card]]\nname = \"card0\"\nkind = \"simgpu\"\nvram_mib = 256\n{drained}{second}");
        Config::parse(&format!("{cards}{WEB}"), "test").unwrap()
    };
    let old = two("");
    let drained = live(&old, |live| {
        live.tunings.get_mut("card0").unwrap().drained = true;
        live.vms.get_mut("web").unwrap().card = "card1".to_owned();
    });
    let state = State::between(&old, &drained).unwrap();
    let text = serde_json::to_string(&state).unwrap();
    // The drain mark is an ordinary key, so that states of earlier daemons remain readable.
    assert!(text.starts_with(r#"{"version":1,"#) && text.contains(r#""drained":{"file":false,"now":true}"#), "{text}");
    let before =
        parsed(br#"{"version":1,"cards_changed":{"card0":{"scheduler.strikes":{"file":3,"now":4}}}}"#, Path::new("s"));
    assert!(!before.unwrap().applied(&old).unwrap().0.cards[0].drained);
    let (config, forgotten) = state.applied(&old).unwrap();
    let marks: Vec<_> = config.cards.iter().map(|card| card.drained).collect();
    assert_eq!((marks, &*config.vms[0].card, forgotten.len()), (vec![true, false], "card1", 0));
    // The file itself now contains the drain mark, so an undrained card differs from the file.
    let edited = two("drained = true\n");
    let (config, forgotten) = state.applied(&edited).unwrap();
    assert_eq!((config.cards[0].drained, forgotten.len()), (true, 0));
    let undrained = live(&edited, |live| live.tunings.get_mut("card0").unwrap().drained = false);
    let (config, _) = State::between(&edited, &undrained).unwrap().applied(&edited).unwrap();
    assert!(!config.cards[0].drained);
}
