//! The log: the messages that created and changed the live objects.
//!
//! An entry depends on all objects whose handles are in its message, so the log does not need to know the calls'
//! arguments. A destroyed object stays in the log while another entry depends on it, together with the call that
//! destroyed it.

use std::collections::BTreeMap;
use std::sync::Arc;

use cuda_calls::own::Route;
use cuda_calls::replay::{Change, Ended, Replay, created, replay, replay_own};
use cuda_calls::{Arg, CALLS, Kind, MAX_ARGUMENTS, handle, kind_of, own};
use cuda_ring::{ADDRESSES, PINNED_ADDRESSES};
use foldhash::{HashMap, HashSet};
use worker_link::Obstacle;

use crate::saved::{Image, Step, StepKind};

/// Maximum number of entries. A program that needs more than half of them cannot continue in another worker.
const MAX_ENTRIES: usize = 1 << 18;
/// Maximum total size of the messages, in words. A program that needs more than half of this size cannot continue
/// either.
const MAX_WORDS: usize = 8 << 20;
/// Maximum total size of the images, in bytes. The worker keeps them in its memory.
const MAX_IMAGE_BYTES: usize = 512 << 20;
/// Number of entries below which the log is not compacted.
const MIN_COMPACTED: usize = 4096;
/// Maximum number of passes that search for the capture groups that a replay needs. After the last pass, all groups are
/// kept.
const MAX_SEARCHES: usize = 16;
/// `CU_EVENT_DISABLE_TIMING`.
const DISABLE_TIMING: u64 = 2;

/// Number of an entry. An object is identified by the entry that creates it.
type Id = u64;

/// Key that identifies a live object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Key {
    Handle(u64),
    Address(u64),
    Blob(u64),
    /// Number that the driver has assigned to a texture object, or to a surface object if the flag is set.
    Number(bool, u64),
}

/// Effect of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// Creates an object. The object is a part of its owner, if it has one.
    Creates {
        owner: Option<Id>,
    },
    /// Returns a known object again. The program must then destroy it once more.
    Again(Id),
    Destroys(Id),
    /// Changes an object, or the state of the program if no object is given.
    Changes(Option<Id>),
    /// Belongs to a capture group.
    Captures,
}

#[derive(Clone, Debug)]
struct Entry {
    role: Role,
    step: Step,
    /// Objects that the message depends on.
    uses: Vec<Id>,
    /// Set if another entry depends on the object created by this entry.
    used: bool,
    /// Entries that return the object again.
    again: Vec<Id>,
    /// Number of the capture group that contains the entry, or that captured the graph created by the entry; 0 if there
    /// is no such group.
    group: u64,
    /// Last entry that creates another object from this entry's object, or that captures work with this object; 0 if
    /// there is none.
    last_use: Id,
    /// Set if the message cannot be replayed.
    refused: bool,
    /// Key of the changed part, if a later change of this part replaces this change.
    part: Option<Part>,
}

/// Key of a changed part: the call, the object, and words of the message.
type Part = (u16, Option<Id>, Vec<u64>);

/// Effects of a successful call that are not evident from its message.
#[derive(Clone, Copy, Debug)]
pub struct Outcome<'a> {
    /// Handle of the object that the call returned.
    pub made: Option<u64>,
    /// Set if the object already existed under this handle.
    pub is_known: bool,
    /// Handle of the object that owns the new object, which is destroyed with it.
    pub owner: Option<u64>,
    /// Handle of the object that the call destroyed or released.
    pub dropped: Option<u64>,
    /// Handles of all destroyed objects.
    pub ended: &'a [u64],
    /// Arguments that were passed to the driver.
    pub values: &'a [u64; MAX_ARGUMENTS],
    /// Results of the call.
    pub results: &'a [u64],
    /// The program's last image, and its size in bytes.
    pub image: (&'a [u64], usize),
    /// Set if the call's work was captured.
    pub is_captured: bool,
    /// Number of open captures after the call.
    pub captures: u64,
}

/// A program's log.
#[derive(Debug)]
pub struct Log {
    entries: BTreeMap<Id, Entry>,
    next: Id,
    live: HashMap<Key, Id>,
    parts: HashMap<Part, Id>,
    /// Events with timing, keyed by handle. The value is true if the event was recorded.
    clocks: HashMap<u64, bool>,
    /// Number of the current capture group: captures that were open concurrently, and all of their work. A replay
    /// repeats whole groups.
    group: u64,
    /// Set if a replay cannot repeat a part of the current group.
    is_group_broken: bool,
    /// Number of open captures.
    captures: u64,
    words: usize,
    image_bytes: usize,
    /// Number of entries at which the log is next compacted.
    compacted_at: usize,
    is_full: bool,
    treatments: Vec<Replay>,
    event_create: usize,
    event_records: [usize; 2],
    pitch: usize,
    /// Indices of the calls that return the module of a library or function. Repeated calls return the same module.
    module_queries: [usize; 2],
    /// Indices of calls that return the address of a variable.
    name_queries: [usize; 2],
}

fn index(name: &str) -> usize {
    CALLS.iter().position(|call| call.name == name).unwrap_or(usize::MAX)
}

impl Default for Log {
    fn default() -> Self {
        Self {
            entries: BTreeMap::new(),
            next: 1,
            live: HashMap::default(),
            parts: HashMap::default(),
            clocks: HashMap::default(),
            group: 0,
            is_group_broken: false,
            captures: 0,
            words: 0,
            image_bytes: 0,
            compacted_at: MIN_COMPACTED,
            is_full: false,
            // A call without defined handling prevents replays.
            treatments: CALLS.iter().map(|call| replay(call).unwrap_or(Replay::Refused(Ended::Never))).collect(),
            event_create: index("cuEventCreate"),
            event_records: ["cuEventRecord", "cuEventRecordWithFlags"].map(index),
            pitch: index("cuMemAllocPitch_v2+"),
            module_queries: ["cuFuncGetModule", "cuLibraryGetModule"].map(index),
            name_queries: ["cuModuleGetGlobal_v2+", "cuLibraryGetGlobal+"].map(index),
        }
    }
}

/// Returns true if objects of this kind are reference-counted, and the program must release each reference.
fn is_counted(kind: Kind) -> bool {
    !matches!(kind, Kind::Function | Kind::Node | Kind::Gpu | Kind::Array)
}

impl Log {
    /// Records a described call that has succeeded. `words` contains the message's words after the route.
    pub fn described(&mut self, call: usize, route: Route, words: &[u64], outcome: &Outcome<'_>) {
        let Some(treatment) = self.treatments.get(call).copied() else { return };
        if treatment == Replay::Nothing {
            return;
        }
        if treatment == Replay::Work {
            // A captured event record has no time, unless it has the flag `CU_EVENT_RECORD_EXTERNAL`.
            let is_external = words.get(2).is_some_and(|flags| flags & 1 == 1);
            if self.event_records.contains(&call) && (!outcome.is_captured || is_external) {
                let recorded = words.first().and_then(|event| self.clocks.get_mut(event));
                recorded.into_iter().for_each(|recorded| *recorded = true);
            }
            if !outcome.is_captured {
                return;
            }
        }
        if self.is_full {
            return;
        }
        // A captured allocation belongs to the graph, so a replay cannot repeat it.
        if outcome.is_captured && matches!(treatment, Replay::Allocates | Replay::Frees) {
            self.break_captures();
        }
        let step = |log: &Self| Step {
            kind: StepKind::Message,
            op: call as u16,
            route: route.word(),
            words: words.to_vec(),
            image: log.image_of(call, words, outcome.image),
        };
        let result = |at: usize| outcome.results.get(at).copied().unwrap_or_default();
        let [first, second, _, fourth, ..] = *outcome.values;
        match treatment {
            Replay::Nothing => {}
            Replay::Work => self.capture(step(self)),
            Replay::BeginsCapture => {
                self.captures = outcome.captures;
                if outcome.captures == 1 {
                    self.group += 1;
                    self.is_group_broken = false;
                }
                self.capture(step(self));
            }
            Replay::EndsCapture => {
                let Some(made) = outcome.made else { return };
                let id = self.next;
                self.captures = outcome.captures;
                self.create(Key::Handle(made), step(self), None, self.is_group_broken);
                // The step also ends the capture, so keep it while another graph of the group is needed.
                if let Some(entry) = self.entries.get_mut(&id) {
                    (entry.group, entry.used) = (self.group, true);
                }
            }
            Replay::Creates => {
                let Some(made) = outcome.made else { return };
                if call == self.event_create && words.get(1).is_some_and(|flags| flags & DISABLE_TIMING == 0) {
                    self.clocks.insert(made, false);
                }
                if !outcome.is_known {
                    self.create(Key::Handle(made), step(self), outcome.owner, false);
                } else if kind_of(made).is_some_and(is_counted) && !self.module_queries.contains(&call) {
                    let known = self.live.get(&Key::Handle(made)).copied();
                    if let Some(entry) = known.and_then(|known| self.entries.get_mut(&known)) {
                        entry.again.push(self.next);
                    }
                    if let Some(known) = known {
                        let step = Step { kind: StepKind::Again, ..step(self) };
                        self.push(step, Role::Again(known), None, false);
                    }
                }
            }
            Replay::Destroys => match outcome.dropped {
                Some(dropped) => self.destroy(dropped, step(self), outcome.ended),
                None => {
                    let surface = CALLS
                        .get(call)
                        .is_some_and(|call| call.args.contains(&Arg::DropNumber(cuda_calls::Numbered::Surface)));
                    self.end(Key::Number(surface, first));
                }
            },
            Replay::EndsPrimary => {
                let context = handle(Kind::Context, (first as u32).wrapping_add(1));
                self.destroy(context, step(self), outcome.ended);
            }
            Replay::Changes(change) => self.change(change, step(self), route),
            Replay::Allocates => {
                let bytes = if call == self.pitch { result(1).saturating_mul(fourth) } else { second };
                let address = result(0);
                let placed = (ADDRESSES.start..PINNED_ADDRESSES).contains(&address);
                let step = Step { kind: StepKind::Memory, words: vec![address, bytes], ..step(self) };
                self.create(Key::Address(address), step, None, !placed);
            }
            Replay::Frees => self.end(Key::Address(first)),
            Replay::Refused(ended) => self.refuse(ended, call, step(self), outcome),
        }
    }

    fn refuse(&mut self, ended: Ended, call: usize, step: Step, outcome: &Outcome<'_>) {
        let result = outcome.results.first().copied().unwrap_or_default();
        let key = match ended {
            Ended::ByHandle if outcome.is_known => return,
            Ended::ByHandle => outcome.made.map(Key::Handle),
            Ended::ByAddress => Some(Key::Address(result)),
            Ended::ByNumber => {
                let makes =
                    |call: &cuda_calls::Call| call.args.contains(&Arg::NewNumber(cuda_calls::Numbered::Surface));
                Some(Key::Number(CALLS.get(call).is_some_and(makes), result))
            }
            Ended::With(at) => {
                let target = step.words.get(usize::from(at)).and_then(|of| self.live.get(&Key::Handle(*of))).copied();
                let part = (step.op, target, step.words.clone());
                if !self.parts.contains_key(&part) {
                    self.push(step, Role::Changes(target), Some(part), true);
                }
                return;
            }
            Ended::Never => {
                let part = (step.op, None, Vec::new());
                if !self.parts.contains_key(&part) {
                    self.push(step, Role::Changes(None), Some(part), true);
                }
                return;
            }
        };
        if let Some(key) = key {
            self.create(key, step, outcome.owner, true);
        }
    }

    /// Records captured work, or the start of a capture.
    fn capture(&mut self, step: Step) {
        let id = self.next;
        self.push(step, Role::Captures, None, false);
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.group = self.group;
        }
    }

    /// Records that an open capture has failed, or contains work that cannot be repeated.
    pub fn break_captures(&mut self) {
        self.is_group_broken = true;
    }

    /// Records a successful message of [`own`]. If the message submits work, the work must have been captured. `made`
    /// is the handle of a new node, and `owner` is the handle of its graph.
    pub fn own(&mut self, op: u16, route: Route, words: &[u64], made: Option<u64>, owner: Option<u64>) {
        if self.is_full {
            return;
        }
        let step = Step { kind: StepKind::Message, op, route: route.word(), words: words.to_vec(), image: None };
        let first = words.first().copied().unwrap_or_default();
        match replay_own(op, words.first().copied()) {
            Some(Replay::Creates) if op == own::PIN => self.create(Key::Blob(first), step, None, false),
            Some(Replay::Creates) => {
                if let Some(made) = made.filter(|made| !self.live.contains_key(&Key::Handle(*made))) {
                    self.create(Key::Handle(made), step, owner, false);
                }
            }
            Some(Replay::Changes(change)) => self.change(change, step, route),
            Some(Replay::Work) => self.capture(step),
            _ => {}
        }
    }

    /// Records that a blob is no longer pinned.
    pub fn unpinned(&mut self, blob: u32) {
        self.end(Key::Blob(blob.into()));
    }

    /// Returns the image that a message uses, if any.
    fn image_of(&self, call: usize, words: &[u64], (image, bytes): (&[u64], usize)) -> Option<Arc<Image>> {
        let call = CALLS.get(call)?;
        let at = call.args.iter().position(|arg| *arg == Arg::Image)?;
        // If only new handles precede the image, each of them has one word, and the image's word is 0 if the program
        // passes no image. All other calls pass an image.
        let uses = call.args.iter().take(at).all(|arg| matches!(arg, Arg::New(_))).then(|| words.get(at)).flatten();
        (uses != Some(&0)).then(|| Arc::new(Image { words: image.to_vec(), bytes }))
    }

    /// Returns the message's context, and the objects whose handles it contains. Marks them as used.
    fn uses(&mut self, step: &Step) -> Vec<Id> {
        let context = Route::from_word(step.route).context;
        let context = (context != 0).then(|| handle(Kind::Context, context));
        let words = step.words.iter().copied().filter(|word| kind_of(*word).is_some());
        let mut uses: Vec<Id> =
            words.chain(context).filter_map(|word| self.live.get(&Key::Handle(word)).copied()).collect();
        uses.sort_unstable();
        uses.dedup();
        for id in &uses {
            if let Some(entry) = self.entries.get_mut(id) {
                entry.used = true;
            }
        }
        uses
    }

    fn push(&mut self, step: Step, role: Role, part: Option<Part>, refused: bool) {
        self.words += step.words.len();
        self.image_bytes += step.image.as_ref().map_or(0, |image| image.bytes);
        let uses = self.uses(&step);
        if matches!(role, Role::Creates { .. } | Role::Captures) {
            for used in &uses {
                if let Some(entry) = self.entries.get_mut(used) {
                    entry.last_use = self.next;
                }
            }
        }
        if let Some(part) = &part {
            self.parts.insert(part.clone(), self.next);
        }
        let (used, again, group, last_use) = (false, Vec::new(), 0, 0);
        self.entries.insert(self.next, Entry { role, step, uses, used, again, group, last_use, refused, part });
        self.next += 1;
        if self.entries.len() >= self.compacted_at || self.words > MAX_WORDS || self.image_bytes > MAX_IMAGE_BYTES {
            self.compact();
            self.compacted_at = (2 * self.entries.len()).max(MIN_COMPACTED);
            // Stop recording if a large part of the log remains, because compactions would become too frequent.
            if self.entries.len() > MAX_ENTRIES / 2 || self.words > MAX_WORDS / 2 || self.image_bytes > MAX_IMAGE_BYTES
            {
                self.overflow();
            }
        }
    }

    /// Stops recording because the log is too large.
    fn overflow(&mut self) {
        *self = Self { is_full: true, ..Self::default() };
    }

    fn create(&mut self, key: Key, step: Step, owner: Option<u64>, refused: bool) {
        // An object that still has this key was destroyed without a call, for example with its context.
        self.end(key);
        let owner = owner.and_then(|owner| self.live.get(&Key::Handle(owner)).copied());
        let id = self.next;
        self.live.insert(key, id);
        self.push(step, Role::Creates { owner }, None, refused);
        if let Some(entry) = self.entries.get_mut(&id) {
            // An entry that depends on the owner also depends on the owner's parts.
            entry.used = owner.is_some();
        }
    }

    fn change(&mut self, change: Change, step: Step, route: Route) {
        let context = handle(Kind::Context, route.context);
        let target = match change.target {
            Some(at) => step.words.get(usize::from(at)).copied(),
            None => (route.context != 0).then_some(context),
        };
        let id = target.and_then(|target| self.live.get(&Key::Handle(target)).copied());
        // The object is a default object, or was destroyed with its context.
        if change.target.is_some() && id.is_none() {
            return;
        }
        let part = change.part.map(|mask| {
            let words = step.words.iter().enumerate().take(16);
            let named = words.filter(|(at, _)| mask >> at & 1 == 1).map(|(_, word)| *word);
            (step.op, id, named.collect())
        });
        // A graph keeps the value that was set when the graph was created.
        let uses = change.target.and(id).and_then(|id| self.entries.get(&id));
        let last_use = uses.map_or(0, |entry| entry.last_use);
        if let Some(older) = part.as_ref().and_then(|part| self.parts.remove(part))
            && older > last_use
        {
            self.remove(older);
        }
        self.push(step, Role::Changes(id), part, false);
    }

    /// Removes an entry.
    fn remove(&mut self, id: Id) {
        let Some(entry) = self.entries.remove(&id) else { return };
        self.words -= entry.step.words.len();
        self.image_bytes -= entry.step.image.map_or(0, |image| image.bytes);
        if let Some(part) = entry.part
            && self.parts.get(&part) == Some(&id)
        {
            self.parts.remove(&part);
        }
    }

    /// Removes a destroyed object, and its entry if no other entry depends on it.
    fn end(&mut self, key: Key) {
        if let Some(id) = self.live.remove(&key)
            && self.entries.get(&id).is_some_and(|entry| !entry.used)
        {
            self.remove(id);
        }
    }

    /// Records a call that destroys an object, or releases a reference to it.
    fn destroy(&mut self, dropped: u64, step: Step, ended: &[u64]) {
        let Some(id) = self.live.get(&Key::Handle(dropped)).copied() else { return };
        if !ended.contains(&dropped) {
            let again = self.entries.get_mut(&id).and_then(|entry| entry.again.pop());
            again.into_iter().for_each(|again| self.remove(again));
            return;
        }
        for handle in ended {
            self.clocks.remove(handle);
            if *handle != dropped {
                self.live.remove(&Key::Handle(*handle));
            }
        }
        let Some(entry) = self.entries.get(&id) else { return };
        if entry.used {
            // Use the context of the object's creation, because the context of the call may not exist at this point of
            // the replay.
            let step = Step { route: entry.step.route, image: None, ..step };
            self.push(step, Role::Destroys(id), None, false);
        }
        self.end(Key::Handle(dropped));
    }

    /// Returns the entries that a replay needs, in order.
    fn needed(&self) -> Vec<Id> {
        let mut groups = HashSet::default();
        for _ in 0..MAX_SEARCHES {
            let (kept, found) = self.needed_with(&groups);
            // If new groups were found, repeat the search, because their entries may depend on further objects.
            if found.len() == groups.len() {
                return kept;
            }
            groups = found;
        }
        self.needed_with(&(1..=self.group).collect()).0
    }

    /// Returns the entries that a replay needs if it repeats these capture groups, and the resulting set of groups.
    fn needed_with(&self, groups: &HashSet<u64>) -> (Vec<Id>, HashSet<u64>) {
        let mut groups = groups.clone();
        if self.captures > 0 {
            groups.insert(self.group);
        }
        let mut needed: HashSet<Id> = self.live.values().copied().collect();
        let mut kept = Vec::new();
        for (id, entry) in self.entries.iter().rev() {
            let is_needed = match entry.role {
                Role::Creates { owner } => {
                    needed.contains(id)
                        || owner.is_some_and(|owner| needed.contains(&owner))
                        || groups.contains(&entry.group)
                }
                Role::Captures => groups.contains(&entry.group),
                Role::Again(of) | Role::Changes(Some(of)) => needed.contains(&of),
                Role::Changes(None) => true,
                // Only earlier entries determine whether the destroyed object is needed, so decide after the loop.
                Role::Destroys(_) => {
                    kept.push(*id);
                    continue;
                }
            };
            if is_needed {
                kept.push(*id);
                needed.insert(*id);
                if entry.group > 0 {
                    groups.insert(entry.group);
                }
                needed.extend(&entry.uses);
            }
        }
        let destroys = |id: &Id| match self.entries.get(id).map(|entry| entry.role) {
            Some(Role::Destroys(of)) => needed.contains(&of),
            _ => true,
        };
        kept.retain(destroys);
        kept.reverse();
        (kept, groups)
    }

    /// Removes entries that a replay does not need.
    fn compact(&mut self) {
        let needed: HashSet<Id> = self.needed().into_iter().collect();
        let removed: Vec<Id> = self.entries.keys().copied().filter(|id| !needed.contains(id)).collect();
        removed.into_iter().for_each(|id| self.remove(id));
    }

    /// Returns the replay's steps.
    ///
    /// # Errors
    /// Returns the first obstacle, if the program cannot continue in another worker.
    pub fn steps(&mut self) -> Result<Vec<Step>, Obstacle> {
        if self.is_full {
            return Err(Obstacle::Log);
        }
        self.compact();
        for entry in self.entries.values() {
            match (entry.refused, entry.step.kind) {
                (true, StepKind::Memory) => return Err(Obstacle::Placement),
                (true, _) if self.name_queries.contains(&entry.step.op.into()) => return Err(Obstacle::Addresses),
                (true, _) => return Err(Obstacle::Object(entry.step.op.into())),
                (false, _) => {}
            }
        }
        if self.clocks.values().any(|recorded| *recorded) {
            return Err(Obstacle::Timing);
        }
        Ok(self.entries.values().map(|entry| entry.step.clone()).collect())
    }

    /// Records the memory that a step of a replay has allocated.
    pub fn restored(&mut self, step: &Step) {
        if let [address, _] = *step.words {
            self.create(Key::Address(address), step.clone(), None, false);
        }
    }
}

/// Returns the kind and handle of the object that a step creates, if the step is a described call.
pub fn created_by(step: &Step) -> Option<(Kind, u64)> {
    let call = CALLS.get(usize::from(step.op))?;
    if step.kind != StepKind::Message || !matches!(replay(call), Some(Replay::Creates | Replay::EndsCapture)) {
        return None;
    }
    let (kind, at) = created(call)?;
    step.words.get(at).map(|handle| (kind, *handle))
}

#[cfg(test)]
mod tests;
