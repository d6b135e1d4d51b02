//! Figures in the documentation, and the raw files that they are from.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::model::{COSTS, Cost};

/// Files from before a file of figures said of what commit and host it is. None is added: a figure is measured again instead.
const WITHOUT_CONDITIONS: [&str; 15] = [
    "cuda-handover-more.json",
    "cuda-handover-wait.json",
    "cuda-handover.json",
    "cuda-programs.json",
    "cuda-quanta.json",
    "cuda-turns.json",
    "isolation-band.json",
    "isolation-credit.json",
    "isolation-direct.json",
    "isolation-disengaged.json",
    "isolation-fifo.json",
    "lockhold-before.json",
    "lockhold-loaded.json",
    "split.json",
    // A description of the interface, not of a measurement.
    "api.json",
];

/// Pictures from before raw files were kept. None is added.
const PICTURES_WITHOUT_RAW_FILE: [&str; 1] = ["swap-shares.svg"];

fn docs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs")
}

/// The files of `docs` with an ending, by name.
fn files(ending: &str) -> BTreeSet<String> {
    let names = fs::read_dir(docs()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.ends_with(ending)).collect()
}

/// All pages as one text, the decisions among them.
fn pages() -> String {
    let read = |path: PathBuf| fs::read_to_string(path).unwrap();
    let decisions = fs::read_dir(docs().join("decisions")).unwrap().map(|entry| read(entry.unwrap().path()));
    let pages = files(".md").into_iter().map(|page| read(docs().join(page)));
    pages.chain(decisions.map(|text| text.replace("](../", "]("))).collect()
}

/// Names of raw files that a text links to.
fn linked(text: &str) -> Vec<&str> {
    let links = text.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
    links.map(|(target, _)| target).filter(|target| target.ends_with(".json") && !target.contains('/')).collect()
}

/// Rows of the tables of a page, as cells.
fn rows(page: &str) -> Vec<Vec<String>> {
    let lines = page.lines().filter_map(|line| line.strip_prefix("| ")?.strip_suffix('|'));
    lines.map(|line| line.split('|').map(|cell| cell.trim().to_owned()).collect()).collect()
}

#[test]
fn every_row_of_the_evaluation_that_has_a_figure_has_its_raw_file() {
    let page = fs::read_to_string(docs().join("evaluation.md")).unwrap();
    let (mut raw, mut judged) = (None, 0);
    for cells in rows(&page) {
        if let Some(at) = cells.iter().position(|cell| cell == "raw") {
            raw = Some(at);
            continue;
        }
        let raw = raw.unwrap_or_else(|| panic!("a table without raw files: {cells:?}"));
        let verdict = cells.last().unwrap();
        if !["Met", "Missed", "Partly"].iter().any(|judgement| verdict.starts_with(judgement)) {
            assert!(
                ["Not yet", "Cannot"].iter().any(|reason| verdict.starts_with(reason)) || cells[0].is_empty(),
                "{cells:?}"
            );
            continue;
        }
        judged += 1;
        let files = linked(&cells[raw]);
        assert!(!files.is_empty() || cells[raw] == "no figure", "{} has no raw file", cells[0]);
        for file in files {
            assert!(docs().join(file).is_file(), "{}: there is no {file}", cells[0]);
        }
    }
    assert!(judged > 20, "{judged} rows with a verdict");
}

#[test]
fn every_raw_file_says_of_what_it_is_and_is_named_by_a_page() {
    let pages = pages();
    let named = linked(&pages);
    for file in files(".json") {
        assert!(named.contains(&file.as_str()), "no page names {file}");
        let found: Value = serde_json::from_str(&fs::read_to_string(docs().join(&file)).unwrap()).unwrap();
        // Of a card that is lent, what its driver says of it is the host.
        let conditions = [("/run/commit", "/commit"), ("/run/started", "/started"), ("/run/processor", "/smi")];
        let told = conditions.iter().all(|(ours, cards)| found.pointer(ours).or(found.pointer(cards)).is_some());
        assert!(told || WITHOUT_CONDITIONS.contains(&file.as_str()), "{file}: commit, time and host");
    }
}

#[test]
fn every_picture_is_of_a_raw_file_and_on_a_page() {
    let (pages, raw) = (pages(), files(".json"));
    for picture in files(".svg") {
        assert!(pages.contains(&format!("]({picture})")), "no page shows {picture}");
        let of = raw.iter().any(|file| picture.starts_with(file.trim_end_matches(".json")));
        assert!(of || PICTURES_WITHOUT_RAW_FILE.contains(&picture.as_str()), "{picture}: of no raw file");
    }
}

#[test]
fn costs_of_the_model_are_told_as_they_are() {
    let page = fs::read_to_string(docs().join("cost-model.md")).unwrap();
    for Cost { name, us: [low, usual, high], source, .. } in COSTS {
        let row = format!("| `{name}` | {low} | {usual} | {high} | {source} |");
        assert!(page.contains(&row), "cost-model.md has no row {row}");
    }
}
