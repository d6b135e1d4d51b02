//! Supervisors of the share groups' MPS servers.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use cuda_mps::{GroupServer, MpsConfig, Report};

use super::{Note, Notes};
use crate::core::Event;

/// Maximum length of a group name that is used as a folder name, because socket paths are limited in length.
const MAX_FOLDER_NAME: usize = 24;

/// Options for the MPS servers of a card.
#[derive(Clone, Debug)]
pub struct MpsOptions {
    /// Path of `nvidia-cuda-mps-control`.
    pub program: PathBuf,
    /// Parent folder of the servers' folders.
    pub folder: PathBuf,
    /// Name of the card in `CUDA_VISIBLE_DEVICES`.
    pub card: String,
}

/// The servers of a card, by group.
pub(super) struct MpsServers {
    options: Option<MpsOptions>,
    /// The running servers, each with the user of its clients.
    running: BTreeMap<String, (GroupServer, Option<u32>)>,
    notes: Notes,
}

impl MpsServers {
    pub(super) fn new(notes: &Notes) -> Self {
        Self { options: None, running: BTreeMap::new(), notes: notes.clone() }
    }

    /// Sets the options, and takes over the servers of an earlier owner.
    pub(super) fn configure(&mut self, options: MpsOptions) {
        let left = std::fs::read_dir(&options.folder).into_iter().flatten().flatten();
        let left: Vec<PathBuf> = left.map(|entry| entry.path()).filter(|path| path.is_dir()).collect();
        self.options = Some(options);
        for folder in left {
            let record = std::fs::read_to_string(folder.join(RECORD)).unwrap_or_default();
            if let Some((user, group)) = record.split_once(' ') {
                self.begin(group, user.parse().ok(), false);
            }
        }
    }

    /// Starts a group's server, or keeps a running one.
    pub(super) fn start(&mut self, group: &str, user: Option<u32>) {
        match self.running.get(group) {
            // A server of another user ends first, and the state machine then requests a new one.
            Some((server, of)) => server.set_needed(*of == user),
            None => self.begin(group, user, true),
        }
    }

    fn begin(&mut self, group: &str, user: Option<u32>, needed: bool) {
        let unavailable = |why: String| Event::Mps { group: group.to_owned(), report: Report::Unavailable { why } };
        let Some(options) = &self.options else {
            let why = "the owner of the card was started without a folder for MPS servers".to_owned();
            return self.notes.put(Note::Event(unavailable(why)));
        };
        let folder = group_folder(&options.folder, group);
        let made =
            std::fs::create_dir_all(&folder).and_then(|()| std::fs::write(folder.join(RECORD), record(group, user)));
        if let Err(error) = made {
            let why = format!("the folder {} cannot be made: {error}", folder.display());
            return self.notes.put(Note::Event(unavailable(why)));
        }
        let config = MpsConfig { program: options.program.clone(), folder, card: options.card.clone(), user };
        let (notes, name) = (self.notes.clone(), group.to_owned());
        let report = move |report| notes.put(Note::Event(Event::Mps { group: name.clone(), report }));
        match GroupServer::start(config, needed, report) {
            Ok(server) => drop(self.running.insert(group.to_owned(), (server, user))),
            Err(error) => self.notes.put(Note::Event(unavailable(error.to_string()))),
        }
    }

    pub(super) fn retire(&self, group: &str) {
        if let Some((server, _)) = self.running.get(group) {
            server.set_needed(false);
        }
    }

    pub(super) fn poll(&self, group: &str) {
        if let Some((server, _)) = self.running.get(group) {
            server.poll_soon();
        }
    }

    /// Forgets a retired server that has ended.
    pub(super) fn retired(&mut self, group: &str) {
        self.running.remove(group);
    }
}

/// Name of the file in a group's folder with the group's user and name.
const RECORD: &str = "group";

/// Returns the contents of a [`RECORD`] file. The user is `-` if it is not known.
fn record(group: &str, user: Option<u32>) -> String {
    let user = user.map_or_else(|| "-".to_owned(), |user| user.to_string());
    format!("{user} {group}")
}

/// Returns the folder of a group's server. It has the group's name if that is short and safe in a path.
#[must_use]
pub fn group_folder(folder: &Path, group: &str) -> PathBuf {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
    if group.len() <= MAX_FOLDER_NAME && group.chars().all(is_plain) {
        return folder.join(group);
    }
    // The name contains the 64-bit FNV-1a hash. It has a dot, so no other group's folder has this name.
    let hash = group
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
    folder.join(format!(".{hash:016x}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_have_folders_of_their_own_inside_the_cards_folder() {
        let of = |group: &str| group_folder(Path::new("/run/c.mps"), group);
        assert_eq!(of("decoders"), Path::new("/run/c.mps/decoders"));
        for group in ["..", ".", "a/b", "ü", &"x".repeat(64)] {
            let folder = of(group);
            assert_eq!(folder.parent(), Some(Path::new("/run/c.mps")), "{group}");
            assert_eq!(folder.file_name().map(std::ffi::OsStr::len), Some(17), "{group}");
        }
        assert_ne!(of("a/b"), of("a/c"));
    }
}
