/* check.h: whether a daemon can start with its settings, as far as that can be seen without
 * starting it: what attnd --check-config says, and what every start asks first. */
#ifndef ATTND_DAEMON_PROCESS_CHECK_H
#define ATTND_DAEMON_PROCESS_CHECK_H

#include "daemon/config/config.h"

/* Reads the files that the settings name, and looks at folders, addresses, backends and how much
 * memory there is; these last two not of settings that have served, whose cache must outlast short
 * memory and a backend that is not there for a while (device_import). Takes nothing and changes
 * nothing, so a daemon with the same settings may run. Returns an exit code of sysexits.h; why
 * names the setting, its value and what is wrong. */
int settings_check(const struct config *cfg, bool have_served, char *why, size_t why_bytes);

#endif
