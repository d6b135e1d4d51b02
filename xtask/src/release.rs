//! The changelog, in the formats of the packages.

use std::fs;

use anyhow::{Context, Result, ensure};
use jiff::civil::Date;

use crate::run::root;

/// Maintainer in the format of Debian and RPM. The domain is reserved for examples, because the project has no domain.
pub const MAINTAINER: &str = "The gpu-mediator authors <maintainers@gpu-mediator.example.org>";

/// A version in the changelog.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Release {
    pub version: String,
    pub date: Date,
    /// Changes in the version, each on one line and without Markdown markup.
    pub changes: Vec<String>,
}

/// Parses the versions in the changelog, newest first.
///
/// # Errors
/// Returns an error if the file cannot be read, or a version has no date or no changes.
pub fn releases() -> Result<Vec<Release>> {
    parse(&fs::read_to_string(root().join("CHANGELOG.md")).context("CHANGELOG.md")?)
}

fn parse(page: &str) -> Result<Vec<Release>> {
    let mut releases: Vec<Release> = Vec::new();
    let mut is_released = false;
    let mut starts = true;
    for line in page.lines() {
        if let Some(heading) = line.strip_prefix("## ") {
            is_released = heading != "Unreleased";
            if is_released {
                let (version, date) = heading.split_once(" - ").context("a heading is `VERSION - DATE`")?;
                let date = date.parse().with_context(|| format!("the date of {version} in CHANGELOG.md"))?;
                releases.push(Release { version: version.to_owned(), date, changes: Vec::new() });
            }
        }
        let is_text = !line.is_empty() && !line.starts_with('#');
        if is_text && let Some(release) = releases.last_mut().filter(|_| is_released) {
            let item = line.strip_prefix("- ");
            match release.changes.last_mut().filter(|_| !starts && item.is_none()) {
                Some(change) => *change = format!("{change} {}", line.trim()),
                None => release.changes.push(item.unwrap_or(line).to_owned()),
            }
        }
        starts = !is_text;
    }
    for release in &mut releases {
        ensure!(!release.changes.is_empty(), "version {} has no changes in CHANGELOG.md", release.version);
        release.changes.iter_mut().for_each(|change| *change = plain(change));
    }
    Ok(releases)
}

/// Returns a line without code markup and link targets.
fn plain(line: &str) -> String {
    let mut text = String::new();
    let mut rest = line;
    while let Some((before, link)) = rest.split_once('[') {
        text.push_str(before);
        match link.split_once("](").and_then(|(label, target)| Some((label, target.split_once(')')?.1))) {
            Some((label, after)) => {
                text.push_str(label);
                rest = after;
            }
            None => {
                text.push('[');
                rest = link;
            }
        }
    }
    text.push_str(rest);
    text.replace('`', "")
}

/// Returns the changelog of a Debian package.
pub fn debian(package: &str, releases: &[Release]) -> String {
    let mut text = String::new();
    for Release { version, date, changes } in releases {
        text.push_str(&format!("{package} ({version}) unstable; urgency=medium\n\n"));
        changes.iter().for_each(|change| text.push_str(&wrapped(change)));
        text.push_str(&format!("\n -- {MAINTAINER}  {}\n\n", date.strftime("%a, %d %b %Y 00:00:00 +0000")));
    }
    text
}

/// Returns a change as a list item, wrapped to 80 columns.
pub fn wrapped(change: &str) -> String {
    let mut lines = vec!["  *".to_owned()];
    for word in change.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.len() + 1 + word.len() <= 80 => *line = format!("{line} {word}"),
            _ => lines.push(format!("    {word}")),
        }
    }
    lines.iter().map(|line| format!("{line}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Files that contain the version, each with the surrounding text.
    const SHOWN: [(&str, &str); 7] = [
        ("tests/fuzz/Cargo.toml", "version = \"VERSION\""),
        ("fleet/kubernetes/kustomization.yaml", "newTag: VERSION"),
        ("fleet/helm/gpu-mediator/Chart.yaml", "appVersion: VERSION"),
        ("fleet/helm/gpu-mediator/Chart.yaml", "\nversion: VERSION"),
        ("fleet/Containerfile", "gpu-mediator:VERSION"),
        ("docs/guides/kubernetes.md", "gpu-mediator:VERSION"),
        ("docs/guides/operating.md", "gpu-mediator_VERSION_amd64.deb"),
    ];

    #[test]
    fn all_files_show_version_of_the_newest_release() {
        let version = env!("CARGO_PKG_VERSION");
        let newest = releases().unwrap().remove(0);
        assert_eq!(newest.version, version, "the newest version of CHANGELOG.md");
        for (file, text) in SHOWN {
            let shown = fs::read_to_string(root().join(file)).unwrap();
            let expected = text.replace("VERSION", version);
            assert!(shown.contains(&expected), "{file} does not say {expected:?}");
        }
        // The other man pages use the date from the changelog.
        let page = fs::read_to_string(root().join("packaging/guest/gpu-mediator-guest-doctor.1")).unwrap();
        assert!(page.contains(&format!("1 \"{}\"", newest.date)), "the date of gpu-mediator-guest-doctor.1");
    }

    #[test]
    fn changelog_becomes_one_of_debian() {
        let page = "# Changelog\n\nText.\n\n## Unreleased\n\n- Not yet.\n\n## 0.2.0 - 2026-11-29\n\n### Added\n\n- A `page` with a\n  \
                    [guide](docs/page.md).\n- More.\n\n## 0.1.0 - 2026-11-24\n\nA package\nfrom sources.\n";
        let releases = parse(page).unwrap();
        assert_eq!(releases[0].changes, ["A page with a guide.", "More."]);
        assert_eq!(releases[1].changes, ["A package from sources."]);
        assert_eq!(
            debian("x", &releases[..1]),
            format!(
                "x (0.2.0) unstable; urgency=medium\n\n  * A page with a guide.\n  * More.\n\n -- {MAINTAINER}  \
                 Sun, 29 Nov 2026 00:00:00 +0000\n\n"
            )
        );
        assert!(parse("## 0.2.0 - soon\n- x\n").is_err());
        assert!(wrapped(&"word ".repeat(40)).lines().all(|line| line.len() <= 80));
    }
}
