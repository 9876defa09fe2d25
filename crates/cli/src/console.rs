//! `hearth console`: whether there is a console, who may come in, and serving it.
//!
//! The commands write files that the console, a part of `hearth monitor`, reads; neither that nor the daemon has to
//! be running.

use std::io::{BufRead as _, IsTerminal as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::path::PathBuf;
use std::sync::Arc;

use hearth_console::{Accounts, Config, Home, Reach, Role, Settings, TlsFiles, What};
use hearth_daemon::client::Client;
use hearth_daemon::error::{Error, Kind};
use hearth_daemon::rundir::second_socket;
use hearth_fault::Fault;
use hearth_monitor::alerts::host_name;
use hearth_monitor::dirs::{default_state_dir, socket};
use hearth_monitor::{Context, Part};
use serde_json::json;

use crate::args::{
    Console, ConsoleAccount, ConsoleEnable, ConsoleOpen, ConsoleRole, Global, Hypervisor, StateDir,
};
use crate::{Failure, Outcome, attach, mount, print_json};

impl From<ConsoleRole> for Role {
    fn from(role: ConsoleRole) -> Role {
        match role {
            ConsoleRole::Viewer => Role::Viewer,
            ConsoleRole::Operator => Role::Operator,
        }
    }
}

fn refused(fault: Fault) -> Failure {
    Failure::Error(Error::of(Kind::Refused, fault))
}

fn home(state: &StateDir) -> Home {
    Home::new(&state.state_dir.clone().unwrap_or_else(default_state_dir))
}

pub fn run(global: &Global, command: Console) -> Outcome {
    match command {
        Console::Enable(args) => enable(global, args),
        Console::Disable(state) => {
            let home = home(&state);
            let settings = home.settings().map_err(refused)?;
            let settings = Settings {
                enabled: false,
                ..settings
            };
            home.keep(&settings).map_err(refused)?;
            show(global, &home)
        }
        Console::Show(state) => show(global, &home(&state)),
        Console::Open(args) => open(global, &args),
        Console::Account(command) => account(global, command),
    }
}

fn enable(global: &Global, args: ConsoleEnable) -> Outcome {
    let home = home(&args.state);
    let mut settings = home.settings().map_err(refused)?;
    settings.enabled = true;
    if let Some(listen) = args.listen {
        settings.listen = listen;
    }
    if let (Some(cert), Some(key)) = (args.tls_cert, args.tls_key) {
        let absolute = |path: PathBuf| std::path::absolute(&path).unwrap_or(path);
        settings.tls = Some(TlsFiles {
            cert: absolute(cert),
            key: absolute(key),
        });
    }
    let reach = reach()?;
    for (said, name) in [
        (
            reach.allow_path.is_some() && !args.allow_path.is_empty(),
            "allow_path",
        ),
        (
            reach.allow_server.is_some() && !args.allow_server.is_empty(),
            "allow_server",
        ),
    ] {
        if said {
            return Err(refused(Fault::new(
                format!(
                    "{} says `{name}` in [console], and that counts",
                    hearth_config::PATH
                ),
                "change it there and restart hearth-monitor, or take it out there first",
            )));
        }
    }
    if !args.allow_path.is_empty() {
        settings.paths = args.allow_path;
    }
    if !args.allow_server.is_empty() {
        settings.servers = args.allow_server;
    }
    home.keep(&settings).map_err(refused)?;
    show(global, &home)
}

/// What the host's file says of what users may reach.
fn reach() -> Result<Reach, Failure> {
    Ok(crate::monitor::config(None)?.console)
}

fn show(global: &Global, home: &Home) -> Outcome {
    let settings = reach()?.applied(home.settings().map_err(refused)?);
    let accounts = Accounts::read(home).map_err(refused)?;
    if global.json {
        let accounts: Vec<_> = accounts
            .list()
            .map(|(name, role)| json!({"name": name, "role": role}))
            .collect();
        let mut value = json!({ "accounts": accounts, "page": hearth_console::built() });
        if let (Some(all), Ok(kept)) = (value.as_object_mut(), serde_json::to_value(&settings))
            && let Some(kept) = kept.as_object()
        {
            all.extend(kept.clone());
        }
        return print_json(&value);
    }
    match settings.enabled {
        true => println!("console    {}", settings.url()),
        false => println!("console    off; hearth console enable turns it on"),
    }
    for path in &settings.paths {
        println!("path       {}", path.display());
    }
    for server in &settings.servers {
        println!("server     {server}");
    }
    for (name, role) in accounts.list() {
        println!("account    {name} ({})", role.word());
    }
    if settings.enabled && !hearth_console::built() {
        eprintln!(
            "hearth: this binary was built without the console's page; make build makes both"
        );
    }
    Ok(())
}

fn open(global: &Global, args: &ConsoleOpen) -> Outcome {
    let home = home(&args.state);
    let settings = home.settings().map_err(refused)?;
    if !settings.enabled {
        return Err(refused(Fault::new(
            "there is no console",
            "turn it on with hearth console enable",
        )));
    }
    let secret = hearth_console::make_link(&home, args.role.into()).map_err(refused)?;
    // After the #, so that it is sent to nobody and stands in no log.
    let link = format!("{}#/login/{secret}", settings.url());
    if global.json {
        let seconds = hearth_console::LINK_GOOD_FOR.as_secs();
        return print_json(&json!({"link": link, "seconds": seconds}));
    }
    println!("{link}");
    Ok(())
}

/// Something that is done to the accounts.
type Change = Box<dyn FnOnce(&mut Accounts) -> Result<(), Failure>>;

fn account(global: &Global, command: ConsoleAccount) -> Outcome {
    let (home, change): (_, Change) = match command {
        ConsoleAccount::List(state) => {
            let accounts = Accounts::read(&home(&state)).map_err(refused)?;
            if global.json {
                let all = accounts.list();
                let all: Vec<_> = all
                    .map(|(name, role)| json!({"name": name, "role": role}))
                    .collect();
                return print_json(&all);
            }
            for (name, role) in accounts.list() {
                println!("{name}  {}", role.word());
            }
            return Ok(());
        }
        ConsoleAccount::Add(args) => (
            home(&args.state),
            Box::new(move |accounts| {
                let password = password(&args.name)?;
                let added = accounts.add(&args.name, &password, args.role.into());
                added.map_err(refused)
            }),
        ),
        ConsoleAccount::Passwd(args) => (
            home(&args.state),
            Box::new(move |accounts| {
                let password = password(&args.name)?;
                let set = accounts.set_password(&args.name, &password);
                set.map_err(refused)
            }),
        ),
        ConsoleAccount::Remove(args) => (
            home(&args.state),
            Box::new(move |accounts| accounts.remove(&args.name).map_err(refused)),
        ),
    };
    let mut accounts = Accounts::read(&home).map_err(refused)?;
    change(&mut accounts)?;
    let settings = home.settings().map_err(refused)?;
    // The last account of a console that needs one stays.
    if settings.enabled {
        settings.check(&accounts).map_err(refused)?;
    }
    accounts.keep(&home).map_err(refused)
}

/// Keeps a terminal from showing what is typed, until dropped.
struct Hidden(libc::termios);

impl Hidden {
    fn new() -> Option<Hidden> {
        let fd = std::io::stdin().as_raw_fd();
        let mut was = std::mem::MaybeUninit::<libc::termios>::uninit();
        // SAFETY: the descriptor is ours, and a termios is written to where one fits.
        if unsafe { libc::tcgetattr(fd, was.as_mut_ptr()) } != 0 {
            return None;
        }
        // SAFETY: tcgetattr succeeded and filled it in.
        let was = unsafe { was.assume_init() };
        let mut hidden = was;
        hidden.c_lflag &= !libc::ECHO;
        // SAFETY: the descriptor is ours, and the termios is whole.
        let set = unsafe { libc::tcsetattr(fd, libc::TCSAFLUSH, &hidden) } == 0;
        set.then_some(Hidden(was))
    }
}

impl Drop for Hidden {
    fn drop(&mut self) {
        // SAFETY: the descriptor is ours, and the termios is the one it had.
        unsafe { libc::tcsetattr(std::io::stdin().as_raw_fd(), libc::TCSAFLUSH, &self.0) };
    }
}

/// Asks for a password: twice at a terminal, else one line of standard input. Never an argument, which
/// everybody on the host could read.
fn password(name: &str) -> Result<String, Failure> {
    let terminal = std::io::stdin().is_terminal();
    let ask = |prompt: &str| -> Result<String, Failure> {
        let _hidden = terminal.then(Hidden::new).flatten();
        if terminal {
            eprint!("{prompt}: ");
            let _ = std::io::stderr().flush();
        }
        let mut line = String::new();
        let read = std::io::stdin().lock().read_line(&mut line);
        if terminal {
            eprintln!();
        }
        read.map_err(|e| {
            refused(Fault::new(
                format!("cannot read a password: {e}"),
                "type it at a terminal, or give it on standard input",
            ))
        })?;
        Ok(line.trim_end_matches(['\r', '\n']).to_owned())
    };
    let first = ask(&format!("Password for {name}"))?;
    if terminal && ask("The same again")? != first {
        return Err(refused(Fault::new("the two are not the same", "try again")));
    }
    Ok(first)
}

/// The console, as a part of the second service, whose users may reach what the host's file says.
pub struct Shown(pub Reach);

impl Part for Shown {
    fn name(&self) -> &'static str {
        "console"
    }

    fn run(&self, context: &Context) -> Result<(), Error> {
        let config = config(context, self.0.clone());
        let (stop, stopped) = tokio::sync::watch::channel(false);
        let ending = context.stop.clone();
        std::thread::Builder::new()
            .name("mon-console-end".to_owned())
            .spawn(move || {
                ending.wait_for_it();
                // The console may have ended by itself.
                let _ = stop.send(true);
            })
            .map_err(|e| Error::internal(format!("cannot start the console: {e}")))?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|e| Error::internal(format!("cannot start the console: {e}")))?;
        runtime.block_on(hearth_console::run(config, stopped));
        Ok(())
    }
}

fn config(context: &Context, reach: Reach) -> Config {
    let dir = std::path::absolute(&context.run_dir).unwrap_or_else(|_| context.run_dir.clone());
    let global = Global {
        run_dir: Some(dir.clone()),
        json: true,
    };
    let client = Client::of_second(&dir);
    let attach = move |what: What, name: &str, hypervisor: &str| {
        let (all, ask) = match what {
            What::Disk => (
                [Hypervisor::Qemu, Hypervisor::Libvirt, Hypervisor::Proxmox],
                "ask for qemu, libvirt or proxmox",
            ),
            What::Datastore => (
                [Hypervisor::Esxi, Hypervisor::Linux, Hypervisor::Proxmox],
                "ask for esxi, linux or proxmox",
            ),
        };
        let Some(hypervisor) = all.into_iter().find(|h| h.word() == hypervisor) else {
            return Err(Fault::new(format!("{hypervisor:?} is not known here"), ask));
        };
        match what {
            What::Disk => attach::of_disk(&client, &global, name, hypervisor),
            What::Datastore => mount::of_datastore(&client, name, hypervisor),
        }
        .map_err(Fault::from)
    };
    Config {
        home: Home::new(&context.state.path("")),
        reach,
        socket: second_socket(&dir),
        monitor: socket(&dir),
        host: host_name(),
        attach: Some(Arc::new(attach)),
    }
}
