//! Supervisors of the share groups' MPS servers.

use std::collections::BTreeMap;
use std::path::PathBuf;

use cuda_mps::{GroupServer, MpsConfig, Report, group_folder};

use super::{Note, Notes};
use crate::core::Event;

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

/// The MPS servers of a card, keyed by group.
pub(super) struct MpsServers {
    options: Option<MpsOptions>,
    /// The running servers, each with the user ID of its clients.
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
            // A server of another user must exit first. The state machine then requests a new one.
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
            let why = format!("the folder {} cannot be created: {error}", folder.display());
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

    /// Terminates a client's work on the card. The client is about to be killed.
    pub(super) fn terminate(&self, pid: u32) {
        self.running.values().for_each(|(server, _)| server.terminate(pid));
    }

    /// Removes a retired server that has exited.
    pub(super) fn retired(&mut self, group: &str) {
        self.running.remove(group);
    }
}

/// Name of the file in a group's folder that contains the group's user ID and name.
const RECORD: &str = "group";

/// Returns the contents of a [`RECORD`] file. The user ID is `-` if unknown.
fn record(group: &str, user: Option<u32>) -> String {
    let user = user.map_or_else(|| "-".to_owned(), |user| user.to_string());
    format!("{user} {group}")
}
