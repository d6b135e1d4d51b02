//! Options of jobs, and the plugin's arguments in `plugstack.conf`.

use std::ffi::CStr;
use std::path::PathBuf;

/// An option of `srun`, `sbatch`, and `salloc`.
pub struct JobOption {
    /// Name of the option, without dashes.
    pub name: &'static CStr,
    /// Placeholder for the option's value, or `None` if the option has no value.
    pub value: Option<&'static CStr>,
    /// Text for `--help`.
    pub usage: &'static CStr,
}

/// The options. Slurm identifies an option by its index in this list.
pub const OPTIONS: [JobOption; 7] = [
    JobOption {
        name: c"gpu-memory",
        value: Some(c"SIZE"),
        usage: c"Maximum memory of the job on the card, such as 512M or 20G; by default, its shards' part. Memory above that \
            part is not guaranteed",
    },
    JobOption {
        name: c"gpu-weight",
        value: Some(c"WEIGHT"),
        usage: c"Weight for the part of the card's time and memory that is not guaranteed, 1 to 10000; by default, the number of shards",
    },
    JobOption {
        name: c"gpu-class",
        value: Some(c"CLASS"),
        usage: c"Latency class: interactive, normal or background; of the tenants that are due, the better class runs first",
    },
    JobOption {
        name: c"gpu-cap",
        value: Some(c"PERCENT"),
        usage: c"Maximum share of the card's time, even if the rest stays unused; `shards` for its shards' part",
    },
    JobOption {
        name: c"vgpu",
        value: None,
        usage: c"Gives the job a vGPU for a virtual machine instead of access for CUDA programs",
    },
    JobOption {
        name: c"gpu-share-group",
        value: Some(c"NAME"),
        usage: c"Group of jobs of one user whose programs may use the card at the same time, through NVIDIA's MPS",
    },
    JobOption {
        name: c"gpu-sharing",
        value: Some(c"MODE"),
        usage: c"Mode of the group: turns, together, or auto for the one with more progress; the strictest job decides",
    },
];

/// Maximum length of the name of a share group, in bytes.
const MAX_GROUP: usize = 40;
/// Maximum weight.
const WEIGHT_MAX: u32 = 10_000;
/// Maximum size in MiB.
const MIB_MAX: u64 = 16 << 20;

/// The options that a job has set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Given {
    /// Requested card memory in MiB.
    pub memory_mib: Option<u64>,
    /// Weight of the job's memory and time.
    pub weight: Option<u32>,
    /// Latency class. Among tenants that are due, the best class runs first.
    pub class: Option<String>,
    /// Maximum share of the card's time, if limited.
    pub cap: Option<Cap>,
    /// True if the job requests a vGPU.
    pub vgpu: bool,
    /// Name of a group of jobs whose programs can use the card concurrently.
    pub share_group: Option<String>,
    /// Mode in which the group uses the card.
    pub sharing: Option<String>,
}

/// Limit on a job's part of a card's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cap {
    /// The fraction of the card's time that corresponds to the job's shards.
    Shards,
    /// A limit in thousandths of the card's time.
    Permille(u32),
}

impl Given {
    /// Creates an empty set of options.
    #[must_use]
    pub const fn new() -> Self {
        Self { memory_mib: None, weight: None, class: None, cap: None, vgpu: false, share_group: None, sharing: None }
    }

    /// Returns true if no option was given.
    #[must_use]
    pub fn is_silent(&self) -> bool {
        *self == Self::new()
    }

    /// Sets option `number` to a value.
    ///
    /// # Errors
    /// Returns an error if the value is invalid. The message names the expected form.
    pub fn take(&mut self, number: usize, value: &str) -> Result<(), String> {
        match number {
            0 => {
                self.memory_mib =
                    Some(mib(value).ok_or_else(|| wrong("gpu-memory", value, "a size such as 512M or 20G"))?)
            }
            1 => {
                let weight = value.parse().ok().filter(|weight| (1..=WEIGHT_MAX).contains(weight));
                self.weight = Some(weight.ok_or_else(|| wrong("gpu-weight", value, "1 to 10000"))?);
            }
            2 => {
                if !["interactive", "normal", "background"].contains(&value) {
                    return Err(wrong("gpu-class", value, "interactive, normal or background"));
                }
                self.class = Some(value.to_owned());
            }
            3 => {
                let cap = match value {
                    "shards" => Some(Cap::Shards),
                    value => value
                        .parse()
                        .ok()
                        .filter(|part| (1..=100).contains(part))
                        .map(|part: u32| Cap::Permille(part * 10)),
                };
                self.cap = Some(cap.ok_or_else(|| wrong("gpu-cap", value, "`shards`, or percent from 1 to 100"))?);
            }
            4 => self.vgpu = true,
            5 => {
                let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
                if !(1..=MAX_GROUP).contains(&value.len()) || !value.chars().all(is_name) {
                    return Err(wrong("gpu-share-group", value, "up to 40 of the characters A-Z a-z 0-9 - _"));
                }
                self.share_group = Some(value.to_owned());
            }
            6 => {
                if !["turns", "together", "auto"].contains(&value) {
                    return Err(wrong("gpu-sharing", value, "turns, together or auto"));
                }
                self.sharing = Some(value.to_owned());
            }
            _ => return Err(format!("Slurm names option {number}, which does not exist")),
        }
        Ok(())
    }
}

fn wrong(option: &str, value: &str, expected: &str) -> String {
    let shown: String = value.chars().take(40).collect();
    format!("--{option}: `{shown}`, expected {expected}")
}

/// Parses a size with the suffix M or G, and returns it in MiB.
fn mib(text: &str) -> Option<u64> {
    let (number, factor) = match text.strip_suffix('G') {
        Some(number) => (number, 1024),
        None => (text.strip_suffix('M')?, 1),
    };
    let digits = !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit());
    let mib = number.parse::<u64>().ok().filter(|_| digits)?.checked_mul(factor)?;
    (1..=MIB_MAX).contains(&mib).then_some(mib)
}

/// Arguments of the plugin: the words `KEY=VALUE` on its line in `plugstack.conf`. In the paths of the sockets and of
/// the ledger, `%n` stands for the node's name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arguments {
    /// The daemon's admin socket.
    pub socket: PathBuf,
    /// Parent folder of the jobs' sockets. The daemon must be able to create files in it.
    pub sockets: PathBuf,
    /// Number of shards of a card.
    pub shards: u32,
    /// The daemon's cards in Slurm's order. If this list is empty, all cards of the required kind are used, sorted by
    /// name.
    pub cards: Vec<String>,
    /// Granularity of memory sizes in MiB. It is a multiple of the cards' chunk size.
    pub chunk_mib: u64,
    /// File to which the usage of jobs is appended, as one line of JSON per job.
    pub ledger: PathBuf,
    /// Folder of the library that replaces `libcuda.so.1` for programs.
    pub library: PathBuf,
    /// Path of NVIDIA's `libcuda.so.1`, for programs that would otherwise not find it.
    pub driver: Option<PathBuf>,
    /// Path of `scontrol`, which queries and annotates jobs.
    pub scontrol: PathBuf,
    /// Time to wait for an unresponsive daemon, in seconds.
    pub patience_s: u64,
    /// Name of the node.
    pub node: String,
}

impl Default for Arguments {
    fn default() -> Self {
        Self {
            socket: "/run/gpu-mediator/admin.sock".into(),
            sockets: "/run/gpu-mediator".into(),
            shards: 100,
            cards: Vec::new(),
            chunk_mib: 64,
            ledger: "/var/log/gpu-mediator/slurm.jsonl".into(),
            library: "/usr/lib/gpu-mediator/cuda".into(),
            driver: None,
            scontrol: "/usr/bin/scontrol".into(),
            patience_s: 30,
            node: String::new(),
        }
    }
}

impl Arguments {
    /// Parses the arguments.
    ///
    /// # Errors
    /// Returns an error if a word is invalid. The message names the word.
    pub fn read(words: &[&str]) -> Result<Self, String> {
        let mut read = Self::default();
        for word in words {
            let refused = |expected: &str| format!("plugstack.conf: `{word}`, expected {expected}");
            let keys = "KEY=VALUE with one of socket, sockets, shards, cards, chunk, ledger, library, driver, scontrol, patience";
            let (key, value) = word.split_once('=').ok_or_else(|| refused(keys))?;
            let path = || match value.starts_with('/') {
                true => Ok(PathBuf::from(value)),
                false => Err(refused("an absolute path")),
            };
            let number = |most: u64| {
                let number = value.parse::<u64>().ok().filter(|number| (1..=most).contains(number));
                number.ok_or_else(|| refused(&format!("a number from 1 to {most}")))
            };
            match key {
                "socket" => read.socket = path()?,
                "sockets" => read.sockets = path()?,
                "shards" => read.shards = u32::try_from(number(1_000_000)?).unwrap_or(u32::MAX),
                "cards" => read.cards = value.split(',').map(str::to_owned).collect(),
                "chunk" => read.chunk_mib = number(1024)?,
                "ledger" => read.ledger = path()?,
                "library" => read.library = path()?,
                "driver" => read.driver = Some(path()?),
                "scontrol" => read.scontrol = path()?,
                "patience" => read.patience_s = number(600)?,
                _ => return Err(refused(keys)),
            }
        }
        Ok(read)
    }

    /// Returns the arguments with the node's name set, and with `%n` replaced in the paths of the sockets and of the
    /// ledger.
    #[must_use]
    pub fn on(mut self, node: Option<&str>) -> Self {
        let node = node.unwrap_or_default();
        for path in [&mut self.socket, &mut self.sockets, &mut self.ledger] {
            *path = path.to_string_lossy().replace("%n", node).into();
        }
        node.clone_into(&mut self.node);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given(values: &[(usize, &str)]) -> Result<Given, String> {
        let mut given = Given::new();
        values.iter().try_for_each(|(number, value)| given.take(*number, value))?;
        Ok(given)
    }

    #[test]
    fn options_are_read_and_mistakes_name_the_option() {
        let all = given(&[(0, "2G"), (1, "300"), (2, "interactive"), (3, "shards"), (4, "")]).unwrap();
        assert_eq!((all.memory_mib, all.weight, all.cap, all.vgpu), (Some(2048), Some(300), Some(Cap::Shards), true));
        let group = given(&[(5, "decoders"), (6, "auto")]).unwrap();
        assert_eq!((group.share_group.as_deref(), group.sharing.as_deref()), (Some("decoders"), Some("auto")));
        assert_eq!(given(&[(3, "50")]).unwrap().cap, Some(Cap::Permille(500)));
        assert!(given(&[]).unwrap().is_silent());
        for (number, value, told) in [
            (0, "2", "--gpu-memory: `2`, expected a size"),
            (0, "-1G", "--gpu-memory"),
            (0, "99999999999999999999G", "--gpu-memory"),
            (0, "18014398509481985G", "--gpu-memory"),
            (1, "0", "--gpu-weight: `0`, expected 1 to 10000"),
            (2, "fast", "--gpu-class"),
            (3, "101", "--gpu-cap"),
            (5, "a/b", "--gpu-share-group: `a/b`, expected up to 40"),
            (5, "", "--gpu-share-group"),
            (6, "space", "--gpu-sharing: `space`, expected turns"),
            (9, "", "names option 9"),
        ] {
            let error = given(&[(number, value)]).unwrap_err();
            assert!(error.contains(told), "{error}");
        }
    }

    #[test]
    fn arguments_are_read_and_name_the_node() {
        let words = ["socket=/run/%n/admin.sock", "sockets=/run/%n", "shards=8", "cards=b,a", "chunk=16", "patience=2"];
        let read = Arguments::read(&words).unwrap().on(Some("n1"));
        assert_eq!((read.socket, read.sockets), (PathBuf::from("/run/n1/admin.sock"), PathBuf::from("/run/n1")));
        assert_eq!((read.shards, read.cards.len(), read.chunk_mib, read.patience_s), (8, 2, 16, 2));
        for word in ["shards", "shards=0", "chunk=x", "socket=run", "colour=1", "patience=601"] {
            assert!(Arguments::read(&[word]).unwrap_err().starts_with(&format!("plugstack.conf: `{word}`, expected")));
        }
    }
}
