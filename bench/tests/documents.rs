//! Compares the figures in the documentation with their raw files.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

/// Folder of the benchmarks' raw files.
const RESULTS: &str = "bench/results";

/// Files that predate the rule that each results file must name its commit and host. Do not add files to this list.
/// Repeat the measurement instead.
const WITHOUT_CONDITIONS: [&str; 11] = [
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
];

/// Pictures that predate the rule to keep raw files. Do not add pictures to this list.
const PICTURES_WITHOUT_RAW_FILE: [&str; 1] = ["swap-shares.svg"];

/// Pictures in README.md that `cargo xtask docs` generates from code. Tests of `doc-pages` and `mediatorctl` compare
/// them with newly generated ones.
const PICTURES_FROM_CODE: [&str; 2] = ["architecture.svg", "top.svg"];

/// Returns a path relative to the project's root folder.
fn root(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(path)
}

/// Returns the file names in a folder that end with `ending`.
fn files(folder: &str, ending: &str) -> BTreeSet<String> {
    let names = fs::read_dir(root(folder)).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.ends_with(ending)).collect()
}

/// Returns the concatenated text of all pages.
fn pages() -> String {
    let folders = ["docs/guides", "docs/design", "docs/reference", "docs/decisions"];
    let of = |folder: &'static str| files(folder, ".md").into_iter().map(move |page| root(folder).join(page));
    folders.into_iter().flat_map(of).map(|path| fs::read_to_string(path).unwrap()).collect()
}

/// Returns the names of raw files linked from a text.
fn linked(text: &str) -> Vec<&str> {
    let links = text.split("](").skip(1).filter_map(|rest| rest.split_once(')'));
    links.filter_map(|(target, _)| target.strip_prefix("../../bench/results/")).collect()
}

/// Returns the table rows of a page, split into cells.
fn rows(page: &str) -> Vec<Vec<String>> {
    let lines = page.lines().filter_map(|line| line.strip_prefix("| ")?.strip_suffix('|'));
    lines.map(|line| line.split('|').map(|cell| cell.trim().to_owned()).collect()).collect()
}

#[test]
fn evaluation_rows_with_figures_have_raw_files() {
    let page = fs::read_to_string(root("docs/design/evaluation.md")).unwrap();
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
            assert!(root(RESULTS).join(file).is_file(), "{}: there is no {file}", cells[0]);
        }
    }
    assert!(judged > 20, "{judged} rows with a verdict");
}

#[test]
fn raw_files_state_their_origin_and_are_linked_from_a_page() {
    let pages = pages();
    let named = linked(&pages);
    for file in files(RESULTS, ".json") {
        assert!(named.contains(&file.as_str()), "no page names {file}");
        let found: Value = serde_json::from_str(&fs::read_to_string(root(RESULTS).join(&file)).unwrap()).unwrap();
        // A file for a rented card has the driver's report about the card instead of the host's processor.
        let conditions = [("/run/commit", "/commit"), ("/run/started", "/started"), ("/run/processor", "/smi")];
        let told = conditions.iter().all(|(ours, cards)| found.pointer(ours).or(found.pointer(cards)).is_some());
        assert!(told || WITHOUT_CONDITIONS.contains(&file.as_str()), "{file}: commit, time and host");
    }
}

#[test]
fn every_picture_is_of_a_raw_file_and_on_a_page() {
    let (pages, raw) = (pages(), files(RESULTS, ".json"));
    let readme = fs::read_to_string(root("README.md")).unwrap();
    let (from_code, measured): (Vec<_>, Vec<_>) =
        files("docs/images", ".svg").into_iter().partition(|picture| PICTURES_FROM_CODE.contains(&picture.as_str()));
    assert_eq!(from_code, PICTURES_FROM_CODE);
    for picture in from_code {
        assert!(readme.contains(&format!("](docs/images/{picture})")), "README.md does not show {picture}");
    }
    for picture in measured {
        assert!(pages.contains(&format!("](../images/{picture})")), "no page shows {picture}");
        let of = raw.iter().any(|file| picture.starts_with(file.trim_end_matches(".json")));
        assert!(of || PICTURES_WITHOUT_RAW_FILE.contains(&picture.as_str()), "{picture}: of no raw file");
    }
}

/// Returns the text of each page, with the page's folder.
fn pages_with_folders() -> Vec<(PathBuf, String)> {
    let folders = ["", "docs/guides", "docs/design", "docs/reference", "docs/decisions", "fleet/kubernetes"];
    let of = |folder: &'static str| files(folder, ".md").into_iter().map(move |page| (folder, page));
    let read = |(folder, page): (&str, String)| (root(folder), fs::read_to_string(root(folder).join(page)).unwrap());
    folders.into_iter().flat_map(of).map(read).collect()
}

#[test]
fn links_between_pages_and_to_files_exist() {
    let mut links = 0;
    for (folder, text) in pages_with_folders() {
        for (target, _) in text.split("](").skip(1).filter_map(|rest| rest.split_once(')')) {
            let file = target.split('#').next().unwrap_or_default();
            let elsewhere = target.contains("://") || file.is_empty() || file.contains(char::is_whitespace);
            if !elsewhere {
                assert!(folder.join(file).exists(), "{} has a broken link: {target}", folder.display());
                links += 1;
            }
        }
    }
    assert!(links > 300, "{links} links");
}

#[test]
fn decisions_are_short_listed_and_have_a_status() {
    let folder = root("docs/decisions");
    let list = fs::read_to_string(folder.join("README.md")).unwrap();
    for page in files("docs/decisions", ".md").into_iter().filter(|page| page != "README.md") {
        let text = fs::read_to_string(folder.join(&page)).unwrap();
        let title = text.lines().next().and_then(|line| line.strip_prefix("# ")?.split_once(": ")).unwrap();
        assert!(list.contains(&format!("- [{}]({page}): {}\n", title.0, title.1)), "README.md does not list {page}");
        for part in ["Status: ", "**Context.**", "**Decision.**", "**Consequences.**", "**Rejected.**"] {
            assert!(text.contains(&format!("\n{part}")), "{page} has no part {part}");
        }
        assert!(text.lines().count() <= 25, "{page} has more than 25 lines");
    }
}
