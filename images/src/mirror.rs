//! The host's source of Debian packages, found in the environment or in the host's apt configuration.
//!
//! This file intentionally does not contain any host names.

use std::path::{Path, PathBuf};
use std::{env, fs};

use anyhow::{Result, bail};

/// The environment variable that overrides the archive's URI.
pub const MIRROR_VARIABLE: &str = "GPU_MEDIATOR_DEBIAN_MIRROR";
/// The environment variable that overrides the URI of the security archive.
pub const SECURITY_VARIABLE: &str = "GPU_MEDIATOR_DEBIAN_SECURITY_MIRROR";

/// Possible paths of the archive keyring in the `debian-archive-keyring` package. The first existing file is used.
const KEYRINGS: [&str; 2] =
    ["/usr/share/keyrings/debian-archive-keyring.gpg", "/usr/share/keyrings/debian-archive-keyring.pgp"];

/// Debian's distribution template in apt's Python bindings. It also exists on Ubuntu.
const TEMPLATE: &str = "/usr/share/python-apt/templates/Debian.info";

/// The archives from which packages are fetched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mirror {
    /// URI of the archive.
    pub main: String,
    /// URI of the security archive.
    pub security: String,
}

/// One package source of the host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Source {
    uri: String,
    suites: Vec<String>,
    components: Vec<String>,
    signed_by: String,
}

/// Finds the mirror in the environment or, failing that, in the host's package sources or in `TEMPLATE`. An error names
/// the missing setting.
pub fn find() -> Result<Mirror> {
    if let Some(main) = variable(MIRROR_VARIABLE) {
        let security = variable(SECURITY_VARIABLE).unwrap_or_else(|| security_beside(&main));
        return Ok(Mirror { main, security });
    }
    let mut sources = Vec::new();
    for path in source_files(Path::new("/etc/apt")) {
        if let Ok(text) = fs::read_to_string(&path) {
            let deb822 = path.extension().is_some_and(|e| e == "sources");
            sources.extend(if deb822 { parse_deb822(&text) } else { parse_one_line(&text) });
        }
    }
    if let Some(mut mirror) = choose(&sources) {
        if let Some(security) = variable(SECURITY_VARIABLE) {
            mirror.security = security;
        }
        return Ok(mirror);
    }
    if let Some(main) = fs::read_to_string(TEMPLATE).ok().as_deref().and_then(template_uri) {
        let security = security_beside(&main);
        return Ok(Mirror { main, security });
    }
    bail!(
        "the host's apt configuration (/etc/apt/sources.list, /etc/apt/sources.list.d) names no Debian archive, and \
         the guests run stock Debian kernels; set {MIRROR_VARIABLE} to the URI of a Debian mirror (the folder that \
         holds `dists` and `pool`) and run this again"
    )
}

/// Returns the archive's keyring. The error names the package to install.
pub fn keyring() -> Result<PathBuf> {
    match KEYRINGS.iter().map(Path::new).find(|p| p.exists()) {
        Some(path) => Ok(path.to_path_buf()),
        None => bail!(
            "the keyring that Debian packages are verified with is missing ({}); install the package \
             debian-archive-keyring (`sudo apt-get install debian-archive-keyring`, also on Ubuntu) and run this again",
            KEYRINGS[0]
        ),
    }
}

fn variable(name: &str) -> Option<String> {
    env::var(name).ok().map(|v| v.trim_end_matches('/').to_owned()).filter(|v| !v.is_empty())
}

/// Returns the URI of the security archive. By convention, it is the main archive's URI with the suffix `-security`.
fn security_beside(main: &str) -> String {
    format!("{main}-security")
}

fn source_files(etc: &Path) -> Vec<PathBuf> {
    let mut files = vec![etc.join("sources.list")];
    if let Ok(entries) = fs::read_dir(etc.join("sources.list.d")) {
        let mut more: Vec<_> = entries.flatten().map(|e| e.path()).collect();
        more.retain(|p| p.extension().is_some_and(|e| e == "list" || e == "sources"));
        more.sort();
        files.extend(more);
    }
    files
}

/// Parses the one-line format: `deb [options] URI SUITE COMPONENT...`.
fn parse_one_line(text: &str) -> Vec<Source> {
    let mut sources = Vec::new();
    for line in text.lines() {
        let line = line.split('#').next().unwrap_or_default().trim();
        let Some(mut rest) = line.strip_prefix("deb ").map(str::trim_start) else { continue };
        let mut signed_by = String::new();
        if let Some((options, after)) = rest.strip_prefix('[').and_then(|r| r.split_once(']')) {
            let option = options.split_whitespace().find_map(|o| o.strip_prefix("signed-by="));
            signed_by = option.unwrap_or_default().to_owned();
            rest = after;
        }
        let mut words = rest.split_whitespace().map(str::to_owned);
        let (Some(uri), Some(suite)) = (words.next(), words.next()) else { continue };
        sources.push(Source { uri, suites: vec![suite], components: words.collect(), signed_by });
    }
    sources
}

/// Parses the deb822 format: stanzas of `Field: words` lines and their indented continuation lines.
fn parse_deb822(text: &str) -> Vec<Source> {
    let mut sources = Vec::new();
    let mut fields: Vec<(String, String)> = Vec::new();
    for line in text.lines().chain([""]) {
        if line.starts_with('#') {
            continue;
        }
        if line.trim().is_empty() {
            sources.extend(stanza(&fields));
            fields.clear();
        } else if line.starts_with([' ', '\t']) {
            if let Some((_, value)) = fields.last_mut() {
                value.push(' ');
                value.push_str(line.trim());
            }
        } else if let Some((name, value)) = line.split_once(':') {
            fields.push((name.trim().to_ascii_lowercase(), value.trim().to_owned()));
        }
    }
    sources
}

fn stanza(fields: &[(String, String)]) -> Vec<Source> {
    let words = |name: &str| -> Vec<String> {
        let value = fields.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str()).unwrap_or_default();
        value.split_whitespace().map(str::to_owned).collect()
    };
    if !words("types").iter().any(|t| t == "deb") || words("enabled").iter().any(|e| e == "no") {
        return Vec::new();
    }
    let (suites, components) = (words("suites"), words("components"));
    let signed_by = words("signed-by").join(" ");
    let source =
        |uri| Source { uri, suites: suites.clone(), components: components.clone(), signed_by: signed_by.clone() };
    words("uris").into_iter().map(source).collect()
}

/// Selects the archive and the security archive from the host's sources. Returns `None` if none of them is a Debian
/// archive.
fn choose(sources: &[Source]) -> Option<Mirror> {
    let is_security = |s: &Source| s.suites.iter().any(|n| n.ends_with("-security") || n.ends_with("/updates"));
    let releases =
        ["bullseye", "bookworm", "trixie", "forky", "duke", "sid", "oldstable", "stable", "testing", "unstable"];
    let is_debian = |s: &Source| {
        let named =
            |n: &String| releases.iter().any(|r| n == r || n.strip_prefix(r).is_some_and(|x| x.starts_with('-')));
        s.components.iter().any(|c| c == "main") && s.suites.iter().any(named)
    };
    // Suites of third-party archives may also be named after Debian releases.
    let score = |s: &Source| {
        let last = s.uri.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
        let (keyring, name) = (s.signed_by.contains("debian-archive"), last.starts_with("debian"));
        2 * usize::from(keyring) + 2 * usize::from(name) + usize::from(s.suites.iter().any(|n| n.ends_with("-updates")))
    };
    let best = |security: bool| {
        let fit = sources.iter().filter(|s| is_debian(s) && is_security(s) == security && score(s) >= 2);
        fit.max_by_key(|s| score(s)).map(|s| s.uri.trim_end_matches('/').to_owned())
    };
    let main = best(false)?;
    let security = best(true).unwrap_or_else(|| security_beside(&main));
    Some(Mirror { main, security })
}

fn template_uri(text: &str) -> Option<String> {
    let uri = text.lines().find_map(|l| l.trim().strip_prefix("BaseURI:"))?.trim().trim_end_matches('/');
    (!uri.is_empty()).then(|| uri.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const STANZAS: &str = "\
# a comment
Types: deb
URIs: http://mirror.example/debian/
Suites: bookworm
 bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb deb-src
# in the middle
URIs: http://mirror.example/debian-security
Suites: bookworm-security
Components: main

Types: deb
Enabled: no
URIs: http://off.example/debian
Suites: bookworm
Components: main
";

    #[test]
    fn deb822_sources_give_both_archives() {
        let sources = parse_deb822(STANZAS);
        assert_eq!(sources.len(), 2);
        assert_eq!(sources[0].suites, ["bookworm", "bookworm-updates"]);
        let mirror = choose(&sources).unwrap();
        assert_eq!(mirror.main, "http://mirror.example/debian");
        assert_eq!(mirror.security, "http://mirror.example/debian-security");
    }

    #[test]
    fn one_line_sources_skip_third_parties_and_comments() {
        let text = "\
deb http://other.example/apt bookworm main
# deb http://commented.example/debian bookworm main
deb-src http://src.example/debian bookworm main
deb [arch=amd64 signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://mirror.example/pub/debian trixie main
";
        let mirror = choose(&parse_one_line(text)).unwrap();
        assert_eq!(mirror.main, "http://mirror.example/pub/debian");
        assert_eq!(mirror.security, "http://mirror.example/pub/debian-security");
    }

    #[test]
    fn mirror_lists_in_files_pass_through() {
        let text = "Types: deb\nURIs: mirror+file:///etc/apt/mirrors/debian.list\nSuites: trixie\nComponents: main\n";
        assert_eq!(choose(&parse_deb822(text)).unwrap().main, "mirror+file:///etc/apt/mirrors/debian.list");
    }

    #[test]
    fn ubuntu_sources_are_no_debian_mirror() {
        let text =
            "deb http://mirror.example/ubuntu noble main universe\ndeb http://x.example/ubuntu noble-security main\n";
        assert_eq!(choose(&parse_one_line(text)), None);
    }

    #[test]
    fn template_names_the_archive() {
        let text = "Suite: sid\nBaseURI: http://mirror.example/debian/\nDescription: x\n";
        assert_eq!(template_uri(text).as_deref(), Some("http://mirror.example/debian"));
    }
}
