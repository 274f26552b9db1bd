//! How much memory this process may still take, and how much it took.

use std::fs;
use std::path::{Path, PathBuf};

/// Bytes that can be taken without swapping, without the out-of-memory killer, and within the control group's limit;
/// clean page cache counts as free. `None` where the system does not tell.
pub fn available() -> Option<u64> {
    let system = kib_field(&fs::read_to_string("/proc/meminfo").ok()?, "MemAvailable:")?;
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    Some(group_available(&groups, Path::new("/sys/fs/cgroup")).map_or(system, |g| g.min(system)))
}

/// The largest resident set so far, in bytes; 0 where the system does not tell.
pub fn peak_rss() -> u64 {
    fs::read_to_string("/proc/self/status").ok().and_then(|s| kib_field(&s, "VmHWM:")).unwrap_or(0)
}

fn kib_field(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find_map(|l| l.strip_prefix(key))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? << 10)
}

/// The least that any memory group above this process leaves, under the mount point `root`.
fn group_available(groups: &str, root: &Path) -> Option<u64> {
    groups
        .lines()
        .filter_map(|line| {
            let mut fields = line.splitn(3, ':');
            let (_, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
            let files = match controllers {
                "" => Files { base: root.to_path_buf(), limit: "memory.max", usage: "memory.current", prefix: "" },
                c if c.split(',').any(|c| c == "memory") => Files {
                    base: root.join("memory"),
                    limit: "memory.limit_in_bytes",
                    usage: "memory.usage_in_bytes",
                    prefix: "total_",
                },
                _ => return None,
            };
            files.least(path)
        })
        .min()
}

/// Where one version of the kernel's interface keeps its numbers.
struct Files {
    base: PathBuf,
    limit: &'static str,
    usage: &'static str,
    prefix: &'static str,
}

impl Files {
    fn least(&self, path: &str) -> Option<u64> {
        // in a container the group's path may not exist below the mount: then the mount is the group
        let mut dir = self.base.join(path.trim_start_matches('/'));
        let mut least = None;
        loop {
            if let Some(free) = self.free_in(&dir) {
                least = Some(least.map_or(free, |l: u64| l.min(free)));
            }
            if dir == self.base || !dir.pop() {
                return least;
            }
        }
    }

    fn free_in(&self, dir: &Path) -> Option<u64> {
        let number = |name: &str| fs::read_to_string(dir.join(name)).ok()?.trim().parse::<u64>().ok();
        let (limit, usage) = (number(self.limit)?, number(self.usage)?);
        let stat = fs::read_to_string(dir.join("memory.stat")).unwrap_or_default();
        let cached = ["inactive_file", "active_file"]
            .iter()
            .filter_map(|key| {
                let key = format!("{}{key} ", self.prefix);
                stat.lines().find_map(|l| l.strip_prefix(&key)?.trim().parse::<u64>().ok())
            })
            .sum();
        Some(limit.saturating_sub(usage.saturating_sub(cached)))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_in_kibibytes() {
        assert_eq!(kib_field("MemFree: 1 kB\nMemAvailable:   20 kB\n", "MemAvailable:"), Some(20 << 10));
        assert_eq!(kib_field("MemFree: 1 kB\n", "MemAvailable:"), None);
    }

    fn write(dir: &Path, files: &[(&str, &str)]) {
        fs::create_dir_all(dir).unwrap();
        for (name, text) in files {
            fs::write(dir.join(name), text).unwrap();
        }
    }

    #[test]
    fn the_tightest_group_counts_and_page_cache_is_free() {
        let tmp = tempfile::tempdir().unwrap();
        let memory = tmp.path().join("memory");
        write(
            &memory.join("a/b"),
            &[
                ("memory.limit_in_bytes", "1000\n"),
                ("memory.usage_in_bytes", "900\n"),
                ("memory.stat", "inactive_file 1\ntotal_inactive_file 200\ntotal_active_file 100\n"),
            ],
        );
        write(&memory.join("a"), &[("memory.limit_in_bytes", "950"), ("memory.usage_in_bytes", "700")]);
        assert_eq!(group_available("3:cpu:/a/b\n4:memory:/a/b\n0::/x", tmp.path()), Some(250));
        assert_eq!(group_available("4:memory:/a/b", tmp.path()), Some(250));
        assert_eq!(group_available("4:memory:/gone/b", tmp.path()), None);
    }

    #[test]
    fn version_two_without_a_limit_leaves_it_to_the_system() {
        let tmp = tempfile::tempdir().unwrap();
        write(&tmp.path().join("x"), &[("memory.max", "max\n"), ("memory.current", "5\n")]);
        assert_eq!(group_available("0::/x", tmp.path()), None);
        write(&tmp.path().join("x"), &[("memory.max", "100\n"), ("memory.stat", "inactive_file 2\nactive_file 1\n")]);
        assert_eq!(group_available("0::/x", tmp.path()), Some(98));
    }
}
