//! A host that is short of memory: a control group with a limit, and programs in it that want more.

use anyhow::Result;
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};

/// A control group for memory (cgroup v1), gone with this.
#[derive(Debug)]
pub struct Group {
    dir: PathBuf,
}

impl Group {
    /// One in which programs have `limit` bytes of memory together, and what is above is swapped out. `None`, with the reason said
    /// for `test`, where none can be made.
    pub fn of(test: &str, limit: u64) -> Result<Option<Group>> {
        let parent = PathBuf::from("/sys/fs/cgroup/memory");
        let dir = parent.join(format!("hearth-{test}-{}", std::process::id()));
        if let Err(e) = std::fs::create_dir(&dir) {
            println!("SKIPPED {test}: no control group for memory can be made: {e}");
            return Ok(None);
        }
        let group = Group { dir };
        group.allow(limit)?;
        std::fs::write(group.dir.join("memory.swappiness"), "100")?;
        Ok(Some(group))
    }

    /// Where it is.
    pub fn dir(&self) -> &std::path::Path {
        &self.dir
    }

    /// From now on they may have this much.
    pub fn allow(&self, limit: u64) -> Result<()> {
        std::fs::write(self.dir.join("memory.limit_in_bytes"), limit.to_string())?;
        Ok(())
    }

    /// What starts a program in the group: its words come behind.
    pub fn wrap(&self) -> Vec<String> {
        let enter = format!(
            "echo $$ > {}/cgroup.procs && exec \"$@\"",
            self.dir.display()
        );
        ["sh", "-c", &enter, "sh"].map(String::from).to_vec()
    }

    /// A program in the group that fills `mib` MiB of its memory with what it can tell again, and looks at all of it
    /// again and again.
    pub fn hog(&self, mib: u64) -> Result<Hog> {
        const LOOK: &str = "
import array, sys
n = int(sys.argv[1]) << 8
b = array.array('Q', bytes(n << 12))
for i in range(n): b[i << 9] = i * 0x9E3779B97F4A7C15 & (1 << 64) - 1
while True:
    for i in range(n):
        if b[i << 9] != i * 0x9E3779B97F4A7C15 & (1 << 64) - 1: sys.exit('page %d is wrong' % i)
    print('right', flush=True)
";
        let wrap = self.wrap();
        let mut child = Command::new(&wrap[0])
            .args(&wrap[1..])
            .args(["python3", "-c", LOOK, &mib.to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()?;
        let said = child.stdout.take().map(std::io::BufReader::new);
        Ok(Hog { child, said })
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.dir);
    }
}

/// A program that wants memory; ended with this.
#[derive(Debug)]
pub struct Hog {
    child: Child,
    said: Option<std::io::BufReader<ChildStdout>>,
}

impl Hog {
    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Waits until it has looked at all of its memory once more; an error if something in it was wrong.
    pub fn looked(&mut self) -> Result<()> {
        use std::io::BufRead;
        let mut line = String::new();
        if let Some(said) = &mut self.said {
            said.read_line(&mut line)?;
        }
        anyhow::ensure!(
            line == "right\n",
            "the program ended: {:?}",
            self.child.wait()
        );
        Ok(())
    }
}

impl Drop for Hog {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
